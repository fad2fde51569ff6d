"""Runs end with an empty picture, whose drawing takes half the time of a tiny run."""

from tests.runs import undrawn as undrawn
