"""Inference engines: token ids in, token ids and logprobs out (`treadle.core.engine.Engine`).

Which engine sampled a step never matters to what is trained on it.
"""
