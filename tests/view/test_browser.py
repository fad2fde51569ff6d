"""Every page in a real browser: what it shows is what the ledger and the shards hold; hostile text stays text."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest

from tests.cli.worlds import compacted, record
from tests.view.browser import PHONE, WIDE, Viewer, serving
from tests.view.worlds import EMOJI, SCRIPT, UPDATES, log_update, record_calls, record_run
from tests.worlds import make_group
from treadle.core.engine import ProcessId
from treadle.core.types import Status, Trajectory
from treadle.record.ledger import Ledger
from treadle.record.rollout_store import write_shard
from treadle.record.run_directory import RunDirectory

slow = pytest.mark.slow  # the others are enough to see that the pages work


@pytest.fixture(scope="module")
def base(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two runs: the recorded one, and its twin with another seed."""
    twin = record_run(tmp_path_factory.mktemp("twin") / "twin", "seed=9")
    with serving([recorded, twin]) as url:
        yield url


@pytest.fixture
def viewer(browser: Any, base: str) -> Iterator[Viewer]:
    made = Viewer(browser, base, WIDE)
    yield made
    assert made.complaints == []
    made.close()


PAGES = {
    "runs": ("#/", ".run"),
    "overlay": ("#/compare?run=recorded&run=twin", ".chart"),
    "evaluations": ("#/evaluations?before=recorded&after=twin", "table.tasks"),
    "curves": ("#/run/recorded", ".chart .u-over"),
    "groups": ("#/run/recorded/groups", ".lines .line .id"),
    "group": ("#/run/recorded/group/g000000", ".sibling"),
    "trajectory": ("#/run/recorded/trajectory/g000000.0", ".step .message"),
    "failed": ("#/run/recorded/trajectory/g000000.2", ".problems"),
    "stale": ("#/run/recorded/trajectory/g000001.0", ".fate.dropped"),
    "foreign": ("#/run/recorded/trajectory/g000003.0", ".relation"),
    "held-out": ("#/run/recorded/trajectory/e000001-0002.0", ".message"),
    "settings": ("#/run/recorded/config?key=orchestration.max_staleness", "tr.selected"),
    "tokens": ("#/run/recorded/tokens", ".packing"),
    "timeline": ("#/run/recorded/timeline", ".run-time rect"),
    "search": ("#/run/recorded/search?update=1&text=Rome", ".found li"),
    "task": ("#/run/recorded/task/h1?split=held_out", ".sibling"),
    "nowhere": ("#/run/nobody", ".problems"),
}


@pytest.mark.parametrize(("viewport", "theme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide-light", "phone-dark"])
def test_every_page_fits_and_complains_of_nothing(
    browser: Any, base: str, viewport: dict[str, int], theme: str
) -> None:
    viewer = Viewer(browser, base, viewport, theme)
    for name, (route, wait) in PAGES.items():
        page = viewer.open(route, wait)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"
    background = viewer.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 300) == (theme == "dark")
    assert all("404" in complaint for complaint in viewer.complaints)  # of the run that does not exist
    viewer.close()


def test_a_trajectory_shows_the_shards_tokens(viewer: Viewer, recorded: Path) -> None:
    page = viewer.open("#/run/recorded/trajectory/g000000.0", ".t.s")
    rows = [r for r in pq.read_table(recorded / "rollouts").to_pylist() if r["trajectory_id"] == "g000000.0"]
    for number, row in enumerate(sorted(rows, key=lambda r: int(r["step"]))):
        page.locator(f"#step-{number}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#step-{number} .t.s")
        places = page.evaluate(f"[...document.querySelectorAll('#step-{number} .t.s')].map((t) => +t.dataset.at)")
        first = len(row["prompt_ids"])
        assert places == list(range(first, first + len(row["completion_ids"])))
    page.locator("#step-0").scroll_into_view_if_needed()
    page.hover("#step-0 .t.s >> nth=1")
    tip = viewer.text(".tip")
    assert str(rows[0]["completion_ids"][1]) in tip and f"{rows[0]['logprobs'][1]:.2f}"[:5] in tip
    assert "tokenization" in viewer.text("#step-2 .relation") and "computed again" in viewer.text("#step-2 .relation")
    assert "Fork of step 2" in viewer.text("#step-3 .relation")
    assert page.locator(".tree rect.break").count() > 0


def test_segments_and_rejected_calls_are_seen(browser: Any, tmp_path: Path) -> None:
    with serving([record(tmp_path / "run", compacted())]) as url:
        viewer = Viewer(browser, url, PHONE)
        page = viewer.open("#/run/run/trajectory/g000000.0", ".compaction")
        assert [" ".join(line.inner_text().split()) for line in page.query_selector_all(".compaction")] == [
            "Segment 1 from the summary of step 3: 43 tokens in place of 84. "
            "Cost: 2 calls, 11 tokens sampled, 63 read.",
            "Segment 2 shortened by environment or agent: 27 tokens in place of 59. Cost: 26 read.",
        ]
        assert [step.inner_text() for step in page.query_selector_all(".step.rejected h2")] == [
            "Step 2, summary",
            "Step 6",
        ]
        assert [fate.inner_text().strip() for fate in page.query_selector_all(".step.rejected .fate")] == [
            f"Rejected: {why}. Later steps do not build on it, and it is not trained."
            for why in ("the summary is cut off", "its answer was not used")
        ]
        assert "Your summary" in viewer.text("#step-4 .message.role-user")
        assert viewer.complaints == []
        viewer.close()


def test_the_templates_tokens_can_be_hidden(viewer: Viewer) -> None:
    page = viewer.open("#/run/recorded/trajectory/g000001.0", ".t.s")
    assert "<|im_end|>" in viewer.text("#step-0")
    page.click(".chip:has-text('text')")
    viewer.until("!document.querySelector('#step-0').innerText.includes('<|im_')")
    page.evaluate("location.hash = '#/run/recorded/trajectory/g000001.0'")  # as a link or the address bar would
    viewer.until("document.querySelector('#step-0').innerText.includes('<|im_')")
    page.go_back()
    viewer.until("!document.querySelector('#step-0').innerText.includes('<|im_')")
    assert page.locator("#step-0 .message .body").all_inner_texts() == ["Search, then answer.", "What boss?", " page"]


def test_calls_are_open_and_no_number_is_cut(browser: Any, tmp_path: Path) -> None:
    with serving([record_calls(tmp_path / "run", tmp_path / "tokenizer")]) as url:
        viewer = Viewer(browser, url, WIDE)
        page = viewer.open("#/run/run/trajectory/g000000.0", ".message .call")
        assert [page.locator(f"details.{kind}[open]").count() for kind in ("call", "thought")] == [1, 0]
        sides = ("client", "scroll")
        height, whole = (page.evaluate(f"document.querySelector('.call > div').{side}Height") for side in sides)
        assert '"sum": 478' in viewer.text(".call") and 100 < height < whole
        viewer.open("#/run/run/group/g000000", ".sibling")
        for sibling, number in zip(page.query_selector_all(".sibling .body"), (478, 471), strict=True):
            assert sibling.inner_text().startswith(f'{number}, "rows"')
        assert viewer.complaints == []
        viewer.close()


def test_an_overlay_names_runs_and_shows_the_last_value_of_each(browser: Any, tmp_path: Path) -> None:
    many = (
        "training.optimizer.learning_rate=0.5",
        "evaluation.every=9",
        "training.packing=step",
        "rollout.max_steps=9",
    )
    runs = [record_run(tmp_path / "long"), record_run(tmp_path / "short", *many, updates=3)]
    with serving(runs) as url:
        viewer = Viewer(browser, url, WIDE)
        page = viewer.open("#/compare?run=long&run=short", ".chart .u-over")
        shown = viewer.text(".chart:has-text('Sampled tokens') .legend").split("\n")
        assert [" ".join(key.split()) for key in shown] == ["long 32", "short 23 at 3"]
        assert "rollout.max_steps=9" in viewer.text(".groups-key")
        assert "2 more settings that differ" in viewer.text(".groups-key")
        assert "–" not in "".join(page.locator(".legend").all_inner_texts())
        assert viewer.complaints == []
        viewer.close()


def test_runs_with_problems_are_those_that_warn_or_failed(browser: Any, recorded: Path, tmp_path: Path) -> None:
    names = ("well", "failed", "warned", "interrupted")
    runs = {name: Path(shutil.copytree(recorded, tmp_path / name)) for name in names}
    status = {"process": asdict(ProcessId.own()), "written": 1000.0}
    for name, error in (("failed", "RunError: disk full"), ("interrupted", "KeyboardInterrupt")):
        (runs[name] / "status.json").write_text(json.dumps({**status, "error": error}))
    tools = {"env/tool_calls": 3.0, "env/tool_errors": 3.0}
    row = {"kind": "update", "update": UPDATES + 1, "version": UPDATES, "wall_seconds": 80.0, **tools}
    RunDirectory(runs["warned"]).log(row)
    with serving([tmp_path]) as url:
        viewer = Viewer(browser, url, WIDE)
        page = viewer.open("#/", ".run")
        assert page.locator(".run").count() == 4
        page.click(".chip:has-text('with problems')")
        viewer.until("document.querySelectorAll('.run').length === 2")
        assert {*page.locator(".run .name").all_inner_texts()} == {"failed", "warned"}
        assert "disk full" in viewer.text(".run:has-text('failed') .now")
        viewer.close()


@slow
def test_a_phase_of_the_timeline_leads_to_its_groups(viewer: Viewer) -> None:
    page = viewer.open("#/run/recorded/timeline", ".run-time rect")
    viewer.until(f"document.querySelectorAll('.run-time rect').length === {2 * UPDATES + 3}")
    page.click(".phase-warm-start >> nth=0")
    assert (
        "before training: warm start, 50 s" in viewer.text(".tree-note") and page.locator(".attempts-time").count() == 0
    )
    page.hover(".phase-update >> nth=0")
    assert "update" in viewer.text(".tree-note") and "2 s" in viewer.text(".tree-note")
    page.click(".phase-update >> nth=0")
    page.wait_for_selector(".attempts-time canvas")
    assert "update=1&" in f"{page.url}&"
    assert "2 attempts, 3 calls over 1.2 s" in viewer.text(".tree-note >> nth=1")
    page.click(".attempts-time canvas", position={"x": 2, "y": 3})
    page.wait_for_selector(".step")
    assert page.url.endswith("/trajectory/g000001.0?step=0")


@slow
def test_a_token_has_an_address(viewer: Viewer) -> None:
    page = viewer.open("#/run/recorded/trajectory/g000000.0", ".t.s")
    page.click("#step-1 .t.s >> nth=0")
    page.wait_for_selector(".pin")
    address, said = page.url, viewer.text(".pin")
    viewer.open("#/", ".run")
    page.goto(address)
    page.wait_for_selector(".t.pinned")
    assert viewer.text(".pin") == said
    page.click(".chip:has-text('advantage')")
    colour = page.evaluate("getComputedStyle(document.querySelector('#step-0 .t.s')).backgroundColor")
    assert colour != "rgba(0, 0, 0, 0)"


def test_the_table_is_the_ledgers(viewer: Viewer, recorded: Path) -> None:
    page = viewer.open("#/run/recorded/groups", ".lines .line .id")
    with closing(sqlite3.connect(f"{(recorded / 'ledger.sqlite').as_uri()}?immutable=1", uri=True)) as connection:
        names = [name for (name,) in connection.execute("SELECT group_id FROM groups ORDER BY rowid DESC")]
    assert page.locator(".lines .line .id").all_inner_texts() == names
    page.click(".column.reward .by:has-text('format')")
    viewer.until("document.querySelector('.lines .line .id')?.innerText === 'g000003'")
    assert "format 0.13" in viewer.text(".lines .line .mean >> nth=0").replace("\n", " ")
    page.click(".chip:has-text('failed')")
    viewer.until("document.querySelectorAll('.lines .line .id').length === 1")
    assert viewer.text(".lines .line .id") == "g000000" and "step raised <script>" in viewer.text(".lines .line .ended")
    page.keyboard.press("j")
    page.wait_for_selector(".line.selected")
    page.keyboard.press("Enter")
    page.wait_for_selector(".siblings")
    assert page.locator(".sibling").count() == 3
    assert page.locator("a[rel=next].off").count() == 1  # of the failed ones it is the last
    viewer.open("#/run/recorded/group/g000000", "a[rel=next][href]")
    page.keyboard.press("n")
    viewer.until("document.querySelector('h1')?.innerText === 'g000001'")
    page.keyboard.press("u")
    page.wait_for_selector(".lines .line .id")
    page.keyboard.press("?")
    assert "next and previous" in viewer.text(".help")


@slow
def test_filters_colours_and_places_stay(viewer: Viewer) -> None:
    page = viewer.open("#/run/recorded/groups", ".lines .line .id")
    page.evaluate("document.querySelector('.lines').scrollTop = 40")
    page.click(".lines .line .id:has-text('g000002')")
    page.wait_for_selector(".sibling")
    page.go_back()
    viewer.until("document.querySelector('.lines')?.scrollTop === 40")
    page.click(".chip:has-text('mixed')")
    viewer.until("document.querySelectorAll('.lines .line .id').length === 3")
    page.click(".lines .line .id:has-text('g000003')")
    viewer.until("document.querySelector('h1')?.innerText === 'g000003'")
    page.wait_for_selector("a[rel=next][href]")
    page.keyboard.press("n")
    viewer.until("document.querySelector('h1')?.innerText === 'g000001'")
    page.click(".sibling a")
    page.wait_for_selector(".chip:has-text('version')")
    page.click(".chip:has-text('version')")
    page.keyboard.press("n")
    viewer.until("document.querySelector('h1')?.innerText === 'g000001.1'")
    page.wait_for_selector(".chip.on:has-text('version')")
    page.keyboard.press("u")
    page.wait_for_selector(".sibling")
    page.keyboard.press("u")
    viewer.until("document.querySelectorAll('.lines .line .id').length === 3")


@slow
def test_a_point_leads_to_the_groups_of_its_update(viewer: Viewer) -> None:
    page = viewer.open("#/run/recorded", ".chart .u-over")
    box = page.locator(".chart:has-text('Reward') .u-over >> nth=0").bounding_box()
    page.mouse.click(box["x"] + 2, box["y"] + box["height"] / 2)
    viewer.until("location.hash.includes('/groups')")
    viewer.until("document.querySelectorAll('.lines .line .id').length === 2")
    assert "update=1&" in f"{page.url}&"
    assert set(page.locator(".lines .line .id").all_inner_texts()) == {"g000000", "g000001"}
    viewer.open("#/run/recorded", ".chart .u-over")
    page.click(".chart:has-text('Dropped steps') .u-over >> nth=0", position={"x": 2, "y": 60})
    viewer.until("location.hash.includes('reason=stale')")
    viewer.until("document.querySelector('.lines .line .id')?.innerText === 'g000001'")


def test_a_run_that_grows_is_followed(browser: Any, tmp_path: Path) -> None:
    run = record_run(tmp_path / "growing", updates=2)
    with serving([run]) as url:
        viewer = Viewer(browser, url, WIDE)
        page = viewer.open("#/run/growing", ".chart .u-over")
        assert viewer.text(".facts").split()[1] == "2"
        log_update(RunDirectory(run), 3)
        viewer.until("document.querySelector('.facts dd').innerText.startsWith('3')")
        viewer.open("#/run/growing/groups", ".lines .line .id")
        group = make_group(7, Trajectory("g000007.0", "t7", 0, (), 0.0, Status.DONE))
        with closing(Ledger(run / "ledger.sqlite")) as ledger:
            ledger.record([group], "train", 2, write_shard(run / "rollouts", "train-g000007", [group]))
            page.wait_for_selector(".line .id:has-text('g000007')")
        assert viewer.complaints == []
        viewer.close()


@slow
def test_a_server_that_is_gone_is_missed_and_new_runs_appear(browser: Any, recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded, tmp_path / "runs" / "first")
    with serving([tmp_path / "runs"]) as url:
        viewer = Viewer(browser, url, WIDE)
        page = viewer.open("#/", ".run")
    page.wait_for_selector(".lost:has-text('does not answer')")
    assert page.locator(".run").count() == 1  # what was there stays
    with serving([tmp_path / "runs"], port=int(url.split(":")[2].strip("/"))):
        page.wait_for_selector(".lost", state="detached")
        shutil.copytree(recorded, tmp_path / "runs" / "second")
        page.wait_for_selector(".run .name:has-text('second')")
        viewer.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_hostile_text_stays_text(browser: Any, hostile: Path) -> None:
    with serving([hostile]) as url:
        viewer = Viewer(browser, url, WIDE)
        viewer.open("#/", ".run .name")
        assert viewer.text(".run .name") == hostile.name.replace("\u202e", "\\u202e")
        key = quote(hostile.name, safe="")
        for route in ("", "/groups", "/group/g000000", "/trajectory/g000000.1"):
            viewer.open(f"#/run/{key}{route}")
            viewer.page.wait_for_timeout(300)
            assert viewer.page.title() != "taken" and "\u202e" not in viewer.page.title()
            assert "\u202e" not in viewer.page.evaluate("document.body.textContent")
            assert viewer.page.locator("main script, main img").count() == 0
        viewer.page.wait_for_selector(".message")
        assert EMOJI in viewer.page.evaluate("document.querySelector('.thought').textContent")
        body = viewer.page.evaluate("document.querySelector('main').textContent")
        assert (
            SCRIPT in body and "\\x1b[31m" in body and "\\u202e" in body and "\u202e" not in body and "\x1b" not in body
        )
        assert viewer.page.locator(".message.role-assistant").count() >= 1
        assert viewer.complaints == []
        viewer.close()


def test_an_exported_file_opens_without_a_server(browser: Any, base: str, tmp_path: Path) -> None:
    viewer = Viewer(browser, base, WIDE)
    page = viewer.open("#/run/recorded/trajectory/g000000.2", ".step")
    with page.expect_download() as download:
        page.click("text=export")
    file = tmp_path / "one.html"
    download.value.save_as(file)
    shown = viewer.text(".tokens")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector(".step .t.s")
    assert viewer.text(".tokens") == shown
    assert asked == [file.as_uri()] and viewer.complaints == []
    with page.expect_download() as download:
        viewer.open("#/run/recorded/group/g000000", ".sibling")
        page.click("text=export")
    group = tmp_path / "group.html"
    download.value.save_as(group)
    page.goto(group.as_uri())
    page.wait_for_selector(".sibling")
    page.click(".sibling a >> nth=0")
    page.wait_for_selector(".step .t.s")
    assert viewer.complaints == []
    viewer.close()


def test_pure_functions(viewer: Viewer) -> None:
    """The pages' own functions, in the browser that runs them."""
    found = viewer.page.evaluate((Path(__file__).parent / "pure_functions.js").read_text())
    assert found["visible"] == "a\\u202eb\\x1b[1m\n\t🧵\\ud800"
    assert found["figures"] == ["0.412", "12,346", "3.1e-6", "–", "–", "7"]
    assert found["duration"] == "67 min"
    panels = [["Reward", ["reward_mean"]], ["Success in training", ["success"]], ["Entropy", ["entropy"]]]
    assert found["zeros"] == [panels, ["failed", "more"]]
    gap = ["Log-prob gap as KL, engine to learner", ["logprob_gap_kl"]]
    assert found["kl"] == [[gap], [gap, ["KL to the reference", ["kl"]]]]
    assert found["last"] == [[3, 0.5], [1, 0.2], [0, None]]
    assert found["inside"] == [True, True, True, True, True, False, False, False, False, False]
    assert found["smoothed"] == [1, None, 4, 4]
    assert found["band"] == {"mean": [[2, 5]], "low": [[2, 4]], "high": [[2, 6]]}
    assert found["aligned"] == [[1, 2], [None, 5], [3, None]]
    assert found["units"] == [[0, 2, "é"], [2, 1, "d\n"], [3, 1, "e"]] and found["cut"] == ["b", "d\n"]
    assert found["chunks"] == 2
    assert found["messages"] == [["user", 2, 5, 2], ["tool", 5, 6, 1]]
    assert found["lanes"] == {"lanes": [0, 0, 1], "count": 2, "width": 4}
    assert found["at_once"] == [0, 1, 0, 2]
    assert found["alike"] == ["ab", "c", "d", "e", "f"]
    assert found["breaks"] == [{"segment": 2, "cause": "changed", "extra": 1}]
    assert [(p["start"], p["end"], p["update"]) for p in found["intervals"]] == [(0, 4, 1), (4, 6, 1), (6, 9, 2)]
    assert [(s["began"], s["ended"], s["start"]) for s in found["stretches"]] == [(1000, 1006, 0), (9000, 9003, 6)]
    assert found["tally"] == [["done", 2], ["failed", 1]]
    assert found["upon"] == [0, 1, 0, 2]
    assert found["scale"] == [["p 1", "p 0.5", "p 0.1", "p 0"], ["1", "2"], ["yes", "no"]]
    assert found["filters"] == [
        {"reason": "stale"},
        {"cause": "engine"},
        {"status": "max_steps"},
        {"preset": "failed"},
        {"reason": "refused"},
        {},
    ]
    assert found["routes"] == [["run", "a b", "groups"], ["run", "%E0%A4%A"]]
    assert found["link"] == "#/run/a%2Fb?update=3"
    assert (
        found["colours"][0] == "transparent" and "--bad" in found["colours"][1] and found["colours"][2] == "transparent"
    )
