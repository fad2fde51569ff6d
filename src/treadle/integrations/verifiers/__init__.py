"""verifiers: its environments play attempts themselves, unmodified, against each attempt's session.

    data.train.source: verifiers ── driver.verifiers ──> rows of the environment's own data set
    driver: verifiers ── driver.VerifiersDriver ── worker process ── child/ ── the library's own rollout

`child` contains the code of the worker processes, in a Python with the library; both of its generations are supported.
"""
