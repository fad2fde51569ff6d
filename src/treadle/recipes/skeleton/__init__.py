"""An environment of our own, its tasks and its recipe."""
