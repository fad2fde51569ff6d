"""Writes the tables of docs/conformance.md from conformance/results: `python -m conformance.page`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.check import ASPECTS, RESULTS, load_cases

PAGE = Path(__file__).resolve().parent.parent / "docs" / "conformance.md"
BEGIN, END = "<!-- written by `python -m conformance.page` -->\n", "<!-- end -->\n"
OF_TOKENS = ("tokens", "old", "advantage")
ORDER = ("treadle", "skyrl", "trl", "tinker_cookbook", "verifiers", "miles", "art")


class Column:
    """One variant of a trainer. notes: its explanations' numbers on the page."""

    def __init__(self, results: dict[str, Any], variant: str, notes: list[int]) -> None:
        found = results["variants"][variant]
        self.title = " ".join(filter(None, (results["trainer"], results["version"], f"`{variant}`" if variant else "")))
        self.aspects, self.unheld = set(found["aspects"]), set(found["not expressible"])
        self.fails = [(case, aspect, notes[n]) for case, aspect, _, n in found["fails"]]
        self.follows = {(case, aspect) for case, aspect in found["follows"]}

    def by_family(self, cases: list[str]) -> str:
        fails = [fail for fail in self.fails if fail[0] in cases and fail[1].startswith(OF_TOKENS)]
        return self._cell(cases, {case for case, _, _ in fails}, {note for _, _, note in fails})

    def by_aspect(self, aspect: str, cases: list[str]) -> str:
        if aspect not in self.aspects:
            return "–"
        fails = [fail for fail in self.fails if fail[1] == aspect]
        judged = [case for case in cases if (case, aspect) not in self.follows]
        return self._cell(judged, {case for case, _, _ in fails}, {note for _, _, note in fails})

    def _cell(self, cases: list[str], failing: set[str], notes: set[int]) -> str:
        held = [case for case in cases if case not in self.unheld]
        if not held:
            return "–"
        passing = f"{len(held) - len(failing)} of {len(held)}" if failing else "pass"
        lacking = f", {len(held)} of {len(cases)}" if not failing and len(held) < len(cases) else ""
        return passing + lacking + "".join(f" [{note}]" for note in sorted(notes))


def tables() -> str:
    """Return the tables and the reasons, in Markdown."""
    cases = load_cases()
    families: dict[str, list[str]] = {}
    for name, case in cases.items():
        families.setdefault(case["family"], []).append(name)
    columns, reasons = list[Column](), list[str]()
    lacks = []
    for name in ORDER:
        results = json.loads((RESULTS / f"{name}.json").read_text())
        notes = [len(reasons) + n for n in range(1, len(results["explanations"]) + 1)]
        reasons += [f"{results['trainer']}: {text}" for text in results["explanations"]]
        columns += [Column(results, variant, notes) for variant in results["variants"]]
        lacks += [f"| {results['trainer']} | {results['lacks']} |"] if results["lacks"] else []
    head = "| " + " | ".join(["", *(column.title for column in columns)]) + " |\n" + "|---" * (len(columns) + 1) + "|\n"
    by_family = [
        f"| {family.replace('_', ' ')} | " + " | ".join(c.by_family(of) for c in columns) + " |"
        for family, of in families.items()
    ]
    by_aspect = [
        f"| {'old log-probabilities' if aspect == 'old' else aspect.replace('_', ' ')} | "
        + " | ".join(c.by_aspect(aspect, list(cases)) for c in columns)
        + " |"
        for aspect in ASPECTS
    ]
    listed = [f"[{n}] {reason}." for n, reason in enumerate(reasons, 1)]
    return "\n".join(
        [
            "Trained tokens, their old log-probabilities and their advantages, in the cases of each family:\n",
            head + "\n".join(by_family),
            "\nEach thing that is compared, over all cases:\n",
            head + "\n".join(by_aspect),
            "\nWhy cells fail, with file and line in the version above:\n",
            "\n\n".join(listed),
            "\nThe families:\n",
            "| | |\n|---|---|\n"
            + "\n".join(f"| {f.replace('_', ' ')} | {cases[of[0]]['about']} |" for f, of in families.items()),
            "\nNot expressible:\n",
            "| | |\n|---|---|\n" + "\n".join(lacks) + "\n",
        ]
    )


def with_tables(page: str) -> str:
    """Return the page with the tables between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.split(END)[1]


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text()))
    counts = Counter(case["family"] for case in load_cases().values())
    print(f"{PAGE.relative_to(PAGE.parent.parent)}: {sum(counts.values())} cases of {len(counts)} families")


if __name__ == "__main__":
    main()
