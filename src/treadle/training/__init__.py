"""The model, the packed forward pass, the optimizer and checkpoints: what changes weights."""
