"""Runs a command until it ends or standard input closes, then ends its whole process group. Standard library only.

The process that starts this holds the other end of standard input. However that process dies, the pipe closes with it,
and no server is left behind. Must be the leader of its own process group.
"""

import os
import signal
import subprocess
import sys
import threading
import time

GRACE = 5.0  # seconds to end by itself


def end(child: "subprocess.Popen[bytes]") -> None:
    """Ask the group to end, wait for the command, then kill what is left, this process included."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run COMMAND, as in `treadle_launch.py COMMAND ...`, until it ends or standard input closes."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # not SIG_IGN, which the command would inherit
    signal.signal(signal.SIGINT, lambda number, frame: None)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def watch() -> None:
        while os.read(0, 1024):
            pass
        end(child)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    print(f"the server ended with code {code}", file=sys.stderr, flush=True)
    end(child)


if __name__ == "__main__":
    main()
