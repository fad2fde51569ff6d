"""Settings shared by all tests. Nothing heavy is imported here."""

import os

from hypothesis import settings

# Before anything loads torch: one thread a process makes numbers independent of the machine's core count, and
# keeps parallel test processes from fighting over cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Commands that take all cores run beside other tests: threads that spin while they wait would starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
