"""The command line: parses, calls the layers below and prints. `main` is the entry point."""
