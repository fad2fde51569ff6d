"""The command line: parses arguments, calls the layers below and prints. `main` is the entry point."""
