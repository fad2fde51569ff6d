"""Attempt drivers, which play one attempt on a session.

    Rollouts.start -> driver.open_session (at once, in order) -> driver.play -> Outcome -> Trajectory

`driver` defines the interface and how to add a driver, `environment` plays environments, `gateway` agent programs and
others that call the model over HTTP, and `outcome` is the one table from the cause of an attempt's end to its
trajectory.
"""
