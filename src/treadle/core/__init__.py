"""Records, keyed draws, the Engine protocol, errors, configuration and the registry.

Needs only the standard library, numpy, pydantic and PyYAML. Every other layer builds on this one.
"""
