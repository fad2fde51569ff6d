"""`treadle view`."""

from __future__ import annotations

import argparse
import secrets
import sys
import webbrowser
from pathlib import Path

from treadle.cli.console import Console
from treadle.cli.options import Commands, add_command
from treadle.core.config import build
from treadle.core.errors import ConfigError, RunError
from treadle.rollout.gateway.address import GatewayConfig, listen, url_of

_EXAMPLES = """examples:
  treadle view                                 all runs in ./runs
  treadle view runs/demo --open                one run, and the browser comes by itself
  treadle view runs/demo-seed* /data/runs      several runs, and all in a folder

It prints a link with a secret. Whoever has the link can read these runs, so it listens on this machine alone. A run on
another machine is seen through a tunnel, with the same link:
  ssh -L 8321:127.0.0.1:8321 MACHINE treadle view runs

Runs may be going on. They are read only: nothing is written into them, and none ever waits. Ctrl-C ends it.
"""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "view", run, "show runs in the browser", _EXAMPLES)
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="run directories, or folders of runs (default: runs)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=int, default=8321, help="0: any free one (default: 8321)")
    parser.add_argument("--open", action="store_true", help="open the link in this machine's browser")


def run(options: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C; returns 0."""
    paths = options.runs or [Path("runs")]
    for path in paths:
        if not path.is_dir():
            raise RunError(f"no directory {str(path)!r}; name run directories, or folders that hold some")
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port}: ports lie in [0, 65535]")
    import uvicorn

    from treadle.view.app import guarded_app  # FastAPI

    token = secrets.token_urlsafe(24)
    address = build(GatewayConfig, {"host": options.host, "port": options.port}, "treadle view")
    with listen(address, "--{} {}") as listening:
        link = f"{url_of(listening)}/?token={token}"
        console = Console()
        console.line(f"{', '.join(map(str, paths))}; Ctrl-C ends it")
        console.line(("open  ", "bold"), link)
        sys.stdout.flush()
        if options.open:
            webbrowser.open(link)
        app = guarded_app(paths, token, [options.host])
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=1
        )
        uvicorn.Server(config).run(sockets=[listening])
    return 0
