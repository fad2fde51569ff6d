"""Other people's agents and environments, each behind an `AttemptDriver` or an `Environment`."""
