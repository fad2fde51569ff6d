"""Models: loading, supported features, and the named sets of their weights."""
