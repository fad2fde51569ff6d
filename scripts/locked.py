"""locked.py LOCK COMMAND ...: run the command while holding the lock file, after whoever else holds it."""

import fcntl
import subprocess
import sys

with open(sys.argv[1], "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    sys.exit(subprocess.call(sys.argv[2:], close_fds=False))
