"""The Tinker protocol: anybody's training loop on this machine's learner and engine."""
