"""One module per trainer: how a case is given to it, and how its rows are read; see docs/conformance.md."""
