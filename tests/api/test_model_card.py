"""The model card of an export: figures, settings, base and licence, and nothing of the machine that trained it."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.worlds import tiny
from treadle.api.model_card import find_licence, model_card
from treadle.models.model_files import BASE


def update(number: int, reward: float | None) -> dict[str, Any]:
    return {"kind": "update", "update": number, "reward_mean": reward}


def evaluation(number: int, success: float, temperature: float = 1.0) -> dict[str, Any]:
    figures = {"reward_mean": success / 2, "success": success, "temperature": temperature}
    return {"kind": "evaluation", "update": number, **figures}


def card(*overrides: str, rows: list[dict[str, Any]], at: int, files: dict[str, bytes] | None = None) -> list[str]:
    return model_card(tiny(*overrides), rows, at, files or {}).decode().splitlines()


def test_the_table_has_the_evaluations_up_to_the_checkpoint() -> None:
    rows = [evaluation(0, 0.2), evaluation(0, 0.9, temperature=0.0), update(1, 0.25), update(2, 0.5), update(3, None)]
    lines = card(rows=[*rows, evaluation(2, 0.4), evaluation(3, 0.6), evaluation(4, 0.8)], at=3)
    assert [line for line in lines if line.startswith("| ") and line[2].isdecimal()] == [
        "| 0 |  | 0.100 | 0.200 |",
        "| 2 | 0.375 | 0.200 | 0.400 |",
        "| 3 |  | 0.300 | 0.600 |",
    ]
    lines = card(rows=[update(n, n / 100) for n in range(1, 41)], at=40)
    assert [line for line in lines if line.startswith("| 4")] == ["| 4 | 0.025 |  |  |", "| 40 | 0.385 |  |  |"]


def test_the_head_names_a_base_of_the_hub_and_its_licence_and_no_directory_is_told(tmp_path: Path) -> None:
    own = b"---\nlanguage: en\nlicense: mit\n---\nlicense: none\n"
    lines = card("model={path: acme/tiny@main}", rows=[], at=1, files={"README.md": own})
    head = yaml.safe_load("\n".join(lines[1 : lines.index("---", 1)]))
    assert (head["base_model"], head["license"], head["library_name"]) == ("acme/tiny", "mit", "transformers")
    secret = f"data.train={{source: {tmp_path}/rows.jsonl}}"
    text = "\n".join(card(f"model={{path: {tmp_path}/base}}", secret, "training.group_size=5", rows=[], at=1))
    assert "`base`" in text and "`rows.jsonl`" in text and str(tmp_path) not in text
    assert "\ntraining.group_size: 5\n" in text and "base_model" not in text


def test_where_a_licence_is_found(tmp_path: Path) -> None:
    assert find_licence({"config.json": b"{}"}) is None
    assert find_licence({"README.md": b"# No head\nlicense: mit\n", "LICENSE.txt": b"text"}) == "LICENSE.txt"
    assert find_licence({"source.json": json.dumps({"licence": "apache-2.0"}).encode()}) == "apache-2.0"
    (tmp_path / "README.md").write_text("---\nlicense: bsd\n---\n")
    assert find_licence({BASE: json.dumps({"path": str(tmp_path)}).encode()}) == "bsd"
    assert find_licence({BASE: json.dumps({"path": str(tmp_path / "gone")}).encode()}) is None


HOSTILE = "<img src=x onerror=alert(1)> &lt; [a](javascript:b) ![i](http://c) `` <b>"


def test_names_are_shown_and_are_no_html_or_links(tmp_path: Path) -> None:
    """As a reader of CommonMark sees them: entities and escaped brackets."""
    hostile = json.dumps(HOSTILE)
    licence = {"README.md": b"---\nlicense: <script>x</script>\n---\n"}
    named = [f"recipe={hostile}", f"about={hostile}", f"data.train.source={hostile}", f"environment={hostile}"]
    lines = card(*named, f"model={{path: {hostile}}}", rows=[], at=1, files=licence)
    [title] = (line for line in lines if line.startswith("# "))
    shown = r"# &lt;img src=x onerror=alert(1)&gt; &amp;lt; \[a\](javascript:b) \!\[i\](http://c) \`\` &lt;b&gt;"
    assert title == shown
    assert title.removeprefix("# ") in lines  # about
    assert "That of the base: &lt;script&gt;x&lt;/script&gt;." in lines
    [trained] = (line for line in lines if line.startswith("Trained with"))
    spans = re.findall("``` (.*?) ```", trained)  # a fence that the text does not have
    assert spans == [HOSTILE] * 3 and "<" not in re.sub("``` (.*?) ```", "", trained)
    fence = lines.index("```yaml")
    assert not any("<img" in line for line in lines[:fence] if line != trained)


def test_usual_names_are_left_alone() -> None:
    lines = card("recipe=my_run-2.b", rows=[], at=1)
    assert "# my_run-2.b" in lines
