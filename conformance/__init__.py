"""A conformance suite for trainers of multi-turn agents; see docs/conformance.md."""
