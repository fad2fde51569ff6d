"""What is decided before anything is sampled: the configuration, checked, and what follows from it."""
