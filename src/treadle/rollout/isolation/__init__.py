"""User code behind the one boundary through which a run calls it: what it raises, how long it takes, what it blocks."""
