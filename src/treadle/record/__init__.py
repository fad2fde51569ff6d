"""A run on disk: ledger, token arrays, checkpoints, traces; how they are written and read."""
