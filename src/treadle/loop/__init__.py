"""The loop: sampling, groups, updates, evaluations, and when to stop."""
