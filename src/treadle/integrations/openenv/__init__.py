"""OpenEnv: environments behind a server, one session per attempt.

driver: openenv ── driver.OpenEnvDriver ── worker process ── child/treadle_openenv.py ── the library's client ── server
"""
