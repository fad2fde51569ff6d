"""The loop: sample groups, keep them durably, train on them, publish the weights, resume after a kill."""
