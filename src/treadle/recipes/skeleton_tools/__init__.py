"""An environment with tools of our own, its tasks and its recipe."""
