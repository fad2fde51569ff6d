"""The loop itself, and what it decides: evaluations, checkpoints, when to stop."""
