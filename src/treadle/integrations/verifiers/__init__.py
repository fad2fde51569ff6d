"""verifiers: its environments play attempts themselves, unmodified, against the session of each attempt.

    data.train.source: verifiers ── driver.verifiers ──> rows of the environment's own data set
    driver: verifiers ── driver.VerifiersDriver ── worker process ── child/ ── the library's own rollout

`child` holds what the worker processes run, in a Python that has the library; both of its generations are understood.
"""
