"""From steps to micro-batches: how recorded tokens are laid out for the forward pass (numpy only).

A layout is a matter of cost; loss, gradients and metrics do not depend on it.
"""
