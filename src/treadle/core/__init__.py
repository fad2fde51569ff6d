"""Records, keyed draws, the Engine protocol, errors, configuration and the registry.

Standard library, numpy, pydantic and PyYAML only: every other layer stands on this one, it stands on none.
"""
