"""A viewer on a socket, and Debian's Chromium, driven by Playwright's package without its own browsers."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.until import CEILING, wait_until
from treadle.view.app import guarded_app

CHROMIUM = os.environ.get("TREADLE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
TOKEN = "token-of-a-test"
WIDE, PHONE = {"width": 1280, "height": 720}, {"width": 390, "height": 844}


def require_chromium() -> str:
    """Return where Chromium is; skips the test without it, but fails it in continuous integration."""
    if CHROMIUM is None:
        reason = "no Chromium: install Debian's package `chromium`, or set TREADLE_CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return CHROMIUM


@contextmanager
def serving(paths: Sequence[Path], port: int = 0) -> Iterator[str]:
    """Serve runs; yields the base URL. port: 0 for any free one."""
    listening = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(guarded_app(paths, TOKEN), log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join()
    listening.close()


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=require_chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


class Viewer:
    """Opens pages of a viewer, and keeps what browsers complain about."""

    def __init__(self, browser: Any, base: str, viewport: dict[str, int], theme: str = "light") -> None:
        self.base, self.complaints = base, list[str]()
        self.context = browser.new_context(viewport=viewport, color_scheme=theme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(CEILING * 1000)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type == "error" else None)
        self.page.goto(f"{base}?token={TOKEN}")

    def open(self, route: str, wait: str = "main h1, main .tabs") -> Any:
        self.page.goto(f"{self.base}{route}")
        self.page.wait_for_selector(wait)
        return self.page

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, expression: str) -> None:
        """Wait until an expression holds. (Playwright's own wait evaluates text, which the pages' policy forbids.)"""
        deadline = time.monotonic() + CEILING
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(50)

    def close(self) -> None:
        self.context.close()
