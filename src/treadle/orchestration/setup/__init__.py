"""From a configuration to the parts of a run, each checked before the first rollout."""
