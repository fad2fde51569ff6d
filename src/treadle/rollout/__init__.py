"""The agent loop, recording sessions and exact chat rendering.

Turns tasks into trajectories with exactly the token ids and logprobs of the inference engine: nothing is ever
re-tokenized.
"""
