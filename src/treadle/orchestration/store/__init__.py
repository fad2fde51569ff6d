"""What a run keeps on disk: its directory, ledger, token arrays and checkpoints, and what can be restored from them."""
