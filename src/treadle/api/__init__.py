"""Training, resuming, evaluating and exporting from Python; what the commands call."""
