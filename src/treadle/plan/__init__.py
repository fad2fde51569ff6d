"""Decisions before anything is sampled: the checked configuration and its consequences."""
