"""Environments and tasks: what an agent acts in, and what it is asked to do.

An environment knows messages and rewards. It knows nothing of tokens, models or training.
"""
