"""The pictures in docs/viewer.md and README.md: the viewer's pages of a run, in Debian's Chromium.

    python scripts/viewer_pictures.py RUN GROUP TRAJECTORY
    python scripts/viewer_pictures.py RUN GROUP TRAJECTORY --every FOLDER

RUN is a run directory; GROUP and TRAJECTORY name what is shown of it. It needs `pip install 'treadle[view]' playwright`
and the package `chromium`. Pictures go to docs/images/. With --every, each page goes to FOLDER instead, for a wide
window and a phone, light and dark, to look through after a change.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZES = {"wide": {"width": 1280, "height": 720}, "phone": {"width": 390, "height": 844}}
IN_DOCS = ("run", "groups", "group", "trajectory")


def routes(group: str, trajectory: str, task: str) -> Mapping[str, tuple[str, str]]:
    """Return name -> route of a run's page, and what is there once it is drawn."""
    return {
        "run": ("", ".chart .u-over"),
        "groups": ("/groups?split=train&preset=mixed", ".lines .line .id"),
        "group": (f"/group/{group}", ".sibling"),
        "trajectory": (f"/trajectory/{trajectory}?colour=logprob", ".t.s"),
        "tokens": ("/tokens", ".packing"),
        "timeline": ("/timeline", ".run-time rect"),
        "settings": ("/config", ".settings"),
        "task": (f"/task/{task}?split=held_out", ".sibling"),
    }


@contextmanager
def served(run: Path) -> Iterator[str]:
    """Start a viewer of the run; yields its link."""
    command = [str(Path(sys.executable).with_name("treadle")), "view", str(run), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        server.stdout.readline()
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait()


@contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium, without a window."""
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield made
        made.close()


def take_pictures(
    run: Path, pages: Mapping[str, tuple[str, str]], size: str, theme: str, folder: Path, prefix: str
) -> None:
    """Take the pictures of some pages. size, theme: of the window; folder, prefix: of the files."""
    with served(run) as link, browser() as chromium:
        page = chromium.new_page(viewport=SIZES[size], color_scheme=theme)
        page.goto(link)
        for name, (route, wait) in pages.items():
            page.goto(f"{link.split('?')[0]}#/run/{run.resolve().name}{route}")
            page.wait_for_selector(wait)
            page.wait_for_timeout(700)
            page.screenshot(path=folder / f"{prefix}{name}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("group")
    parser.add_argument("trajectory")
    parser.add_argument("--task", default="", help="a held-out task")
    parser.add_argument("--every", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    every = {
        k: v for k, v in routes(options.group, options.trajectory, options.task).items() if options.task or k != "task"
    }
    if options.every is None:
        take_pictures(options.run, {name: every[name] for name in IN_DOCS}, "wide", "light", IMAGES, "viewer-")
    else:
        options.every.mkdir(parents=True, exist_ok=True)
        for size in SIZES:
            for theme in ("light", "dark"):
                take_pictures(options.run, every, size, theme, options.every, f"{size}-{theme}-")
