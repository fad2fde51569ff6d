"""From steps to micro-batches: the layout of recorded tokens for the forward pass (numpy only).

The layout affects only cost; loss, gradients and metrics do not depend on it.
"""
