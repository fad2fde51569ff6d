"""Environments and tasks: the world an agent acts in, and its assignment.

An environment knows messages and rewards. It knows nothing of tokens, models or training.
"""
