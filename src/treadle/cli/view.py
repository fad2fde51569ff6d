"""`treadle view`."""

from __future__ import annotations

import argparse
import secrets
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path

from treadle.cli.console import Console
from treadle.cli.options import Commands, add_address, add_command, address_of
from treadle.core.errors import RunError
from treadle.rollout.gateway.address import listen, url_of

_EXAMPLES = """examples:
  treadle view                                 all runs in ./runs
  treadle view runs/demo --open                one run, opened in the browser
  treadle view runs/demo-seed* /data/runs      several runs, and all in a folder

It prints a link with a secret. Anyone with the link can read these runs, so by default it listens on this machine only.
For a run on another machine, open a tunnel and use the same link:
  ssh -L 8321:127.0.0.1:8321 MACHINE treadle view runs

Runs may be in progress. They are only read, and never wait. Press Ctrl-C to stop.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "view", run, "show runs in the browser", _EXAMPLES)
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="run directories, or folders of runs (default: runs)"
    )
    add_address(parser, 8321)
    parser.add_argument("--open", action="store_true", help="open the link in this machine's browser")


def run(options: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C; returns 0."""
    paths = options.runs or [Path("runs")]
    for path in paths:
        if not path.is_dir():
            raise RunError(f"no directory {str(path)!r}; name run directories, or folders that hold some")
    address, token = address_of(options, "treadle view"), secrets.token_urlsafe(24)
    import uvicorn

    from treadle.view.app import guarded_app  # FastAPI

    with listen(address, "--{} {}") as listening:
        link, console = f"{url_of(listening)}/?token={token}", Console()
        app = guarded_app(paths, token, [options.host, listening.getsockname()[0]])  # the link has the latter
        config = uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=1)
        with suppress(KeyboardInterrupt):
            console.line(f"{', '.join(map(str, paths))}; press Ctrl-C to stop")
            console.line(("open  ", "bold"), link)
            sys.stdout.flush()
            if options.open:
                webbrowser.open(link)
            uvicorn.Server(config).run(sockets=[listening])
    return 0
