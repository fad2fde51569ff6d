"""Models: how they are loaded, what they can do, and the named sets of their weights."""
