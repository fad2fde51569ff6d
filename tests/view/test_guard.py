"""Only who has the link reads, by GET alone, under a known name; and whatever is asked, nothing answers with a 500."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.view.conftest import asking
from tests.view.worlds import SCRIPT
from treadle.view.app import POLICY, guarded_app, make_app

TOKEN = "s3cret-token"
BASE = "http://127.0.0.1:8321"


def client(run: Path, base: str = BASE) -> TestClient:
    return TestClient(guarded_app([run], TOKEN), base_url=base, follow_redirects=False)


def opened(run: Path) -> TestClient:
    made = client(run)
    assert made.get("/", params={"token": TOKEN}).status_code == 303
    return made


PATHS = ("/", "/static/app.js", "/api/runs", "/api/runs/recorded", "/export/recorded/trajectory/g000000.0", "/nowhere")


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_answered_without_the_token(recorded: Path, path: str) -> None:
    other = client(recorded)
    requests: list[dict[str, Any]] = [{}, {"params": {"token": "wrong"}}, {"headers": {"cookie": "treadle=x"}}]
    for answer in (other.get(path, **request) for request in requests):
        assert answer.status_code == 403 and "treadle view" in answer.text
        assert answer.headers["content-security-policy"] == POLICY


def test_the_token_becomes_a_cookie_that_no_script_reads(recorded: Path) -> None:
    browser = client(recorded)
    answer = browser.get("/", params={"token": TOKEN})
    assert answer.status_code == 303 and TOKEN not in answer.headers["location"]
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    answer = browser.get("/api/runs")
    assert answer.status_code == 200
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY


HOSTS = {"localhost:99": 200, "[::1]:8321": 200, "127.0.0.1": 200, "evil.example": 421, "127.0.0.1.evil.example": 421}


@pytest.mark.parametrize(("host", "status"), [*HOSTS.items(), ("", 421)])
def test_other_names_are_refused(recorded: Path, host: str, status: int) -> None:
    assert opened(recorded).get("/api/runs", headers={"host": host}).status_code == status


@pytest.mark.parametrize("host", ["Box.example", "fd00::1", "192.0.2.7"])
def test_the_address_that_it_listens_on_is_admitted(recorded: Path, host: str) -> None:
    browser = TestClient(guarded_app([recorded], TOKEN, [host]), base_url=BASE, follow_redirects=False)
    named = {"host": f"{f'[{host}]' if ':' in host else host}:8321"}
    assert browser.get("/", params={"token": TOKEN}, headers=named).status_code == 303


@pytest.mark.slow
def test_the_printed_link_opens_until_ctrl_c(recorded: Path) -> None:
    command = [sys.executable, "-m", "treadle.cli.main", "view", str(recorded), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            answer = httpx.get(server.stdout.readline().split()[-1], follow_redirects=False)
            server.send_signal(signal.SIGINT)
            assert (answer.status_code, server.wait()) == (303, 0)
        finally:
            server.kill()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(recorded: Path, method: str) -> None:
    assert opened(recorded).request(method, "/api/runs").status_code == 405


OUTSIDE = ("../config.yaml", "..%2fconfig.yaml", "%2e%2e/%2e%2e/config.yaml", "/etc/passwd", "vendor/../../models.py",
           "..\\guard.py", "%00")  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_files_of_the_pages_alone_are_given(recorded: Path, path: str) -> None:
    assert opened(recorded).get(f"/static/{path}").status_code == 404
    assert opened(recorded).get(f"/api/runs/{path}").status_code in (404, 405)


_WEIRD = st.one_of(
    st.sampled_from(["recorded", "g000000", "g000000.0", "..", SCRIPT, "\x00", "%", "\u202e", "a" * 2000]),
    st.text(max_size=20),
)
_ROUTES = (
    "/api/runs/{}", "/api/runs/{}/metrics", "/api/runs/{}/breaks", "/api/runs/{}/groups", "/api/runs/{}/groups/{}",
    "/api/runs/{}/trajectories/{}", "/api/runs/{}/trajectories/{}/experts", "/api/runs/{}/search", "/api/runs/{}/task",
    "/api/compare", "/api/runs/{}/counts", "/api/runs/{}/intervals", "/api/runs/{}/calls",
    "/export/{}/trajectory/{}", "/export/{}/group/{}", "/static/{}", "/{}/{}",
)  # fmt: skip
_NAMES = (
    "split", "preset", "search", "update", "sort", "descending", "offset", "limit", "step", "token", "text", "task_id",
    "run", "generation", "after",
)  # fmt: skip
_VALUES = st.one_of(
    _WEIRD,
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from(["train", "held_out", "failed", "reward", "1", "0", "true"]),
)


def test_nothing_answers_with_a_fault(recorded: Path) -> None:
    browser = opened(recorded)
    seen: Counter[int] = Counter()

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(_ROUTES),
        st.lists(_WEIRD, min_size=2, max_size=2),
        st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=5),
    )
    def check(route: str, parts: list[str], query: dict[str, str]) -> None:
        encoded = [quote(part.encode("utf-8", "surrogatepass"), safe="") for part in parts]
        query = {name: value.encode("utf-8", "replace").decode() for name, value in query.items()}
        answer = browser.get(route.format(*encoded), params=query)
        seen[answer.status_code] += 1
        assert answer.status_code < 500, answer.text

    check()
    assert seen[200] and seen[404] and seen[422], seen


def test_hostile_text_is_given_as_text(hostile: Path) -> None:
    get = asking(hostile)
    [run] = get("runs")["runs"]
    key = quote(run["key"], safe="")
    view = get(f"runs/{key}/trajectories/g000000.0")
    shown = "".join(view["texts"].values()) + "".join(j[2] for s in view["segments"] for j in s["joined"])
    assert "\x1b" not in shown and "\u202e" not in shown and "\x00" not in shown
    assert "🧵" in [j[2] for s in view["segments"] for j in s["joined"]]
    kinds = [s["kind"] for s in view["steps"][0]["spans"]]
    assert kinds.count("thought") == 1 and kinds.count("call") == 1
    roles = {s["role"] for s in view["steps"][0]["spans"]}
    assert roles == {"user", "assistant"}  # a marker that was written as text begins no message
    rows = get(f"runs/{key}/metrics")["rows"]
    assert rows[0]["reward_mean"] is None
    page = TestClient(make_app([hostile])).get(f"/export/{key}/group/g000000")
    assert page.status_code == 200 and SCRIPT not in page.text
    assert page.headers["content-disposition"].isascii()
