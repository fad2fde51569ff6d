"""The agent loop, recording sessions and exact chat rendering.

Turns tasks into trajectories whose token ids and logprobs are those of the inference engine:
nothing is ever re-tokenized.
"""
