"""Inference engines: token ids in, token ids and logprobs out (`treadle.core.engine.Engine`).

It never matters to training which engine sampled a step.
"""
