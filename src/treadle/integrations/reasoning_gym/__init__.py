"""Data sets of reasoning-gym, with their scorers."""
