"""Attempt drivers: what plays one attempt on a session.

    Rollouts.start -> driver.open_session (at once, in order) -> driver.play -> Outcome -> Trajectory

`driver` says what a driver is and how one is added, `environment` plays environments, `gateway` agent programs and
others that call the model over HTTP, and `outcome` is the one table from what ended an attempt to what its trajectory
says.
"""
