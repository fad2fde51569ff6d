"""The loop: sampling, groups, updates, evaluations, and stopping."""
