"""Third-party agents and environments, each behind an `AttemptDriver` or an `Environment`."""
