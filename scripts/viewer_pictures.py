"""The pictures in docs/viewer.md and README.md: the viewer's pages of a run, in Debian's Chromium.

    python scripts/viewer_pictures.py RUN GROUP TRAJECTORY

RUN is a run directory; GROUP and TRAJECTORY name what is shown of it. It needs `pip install 'treadle[view]' playwright`
and the package `chromium`. Pictures go to docs/images/.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZE = {"width": 1280, "height": 800}


def main(run: Path, group: str, trajectory: str) -> None:
    """Start a viewer of the run, and take the pictures."""
    pages = {
        "viewer-run": ("", ".chart .u-over"),
        "viewer-groups": ("/groups?split=train&preset=mixed", ".lines .line .id"),
        "viewer-group": (f"/group/{group}", ".sibling"),
        "viewer-trajectory": (f"/trajectory/{trajectory}?colour=logprob", ".t.s"),
    }
    command = [str(Path(sys.executable).with_name("treadle")), "view", str(run), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    server.stdout.readline()
    link = server.stdout.readline().split()[-1]
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            page.goto(link)
            for name, (route, wait) in pages.items():
                page.goto(f"{link.split('?')[0]}#/run/{run.resolve().name}{route}")
                page.wait_for_selector(wait)
                page.wait_for_timeout(500)
                page.screenshot(path=IMAGES / f"{name}.png")
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
