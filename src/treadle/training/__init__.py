"""Training: the model, the packed forward pass, the optimizer and checkpoints."""
