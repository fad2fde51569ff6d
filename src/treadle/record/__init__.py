"""A run on disk: writing and reading its ledger, token arrays, checkpoints and traces."""
