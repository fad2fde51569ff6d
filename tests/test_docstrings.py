"""Docstrings of public names begin with a verb: functions in the imperative, classes in the third person."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import treadle

ROOT = Path(treadle.__file__).parent
IMPERATIVES_IN_S = {"Pass", "Compress", "Process", "Address"}
NO_VERBS = {
    *(
        "The",
        "A",
        "An",
        "All",
        "Of",
        "As",
        "In",
        "On",
        "To",
        "One",
        "It",
        "What",
        "When",
        "Where",
        "How",
        "Why",
        "Which",
    ),
    *(
        "Who",
        "Whether",
        "Text",
        "Number",
        "True",
        "For",
        "From",
        "At",
        "By",
        "With",
        "Same",
        "Each",
        "Every",
        "No",
        "Not",
    ),
    *("None", "This", "Its", "Others", "Ours", "Always"),
}


def documented() -> Iterator[tuple[str, ast.AST, str]]:
    """Place, definition and first word of each public docstring."""
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if text := ast.get_docstring(node):
                found = re.match(r"\w*", text)
                yield (
                    f"{file.relative_to(ROOT)}:{node.lineno} {node.name}: {text[:60]!r}",
                    node,
                    found[0] if found else "",
                )


def test_public_docstrings_begin_with_a_verb() -> None:
    wrong = []
    for place, node, word in documented():
        ends_in_s = word.endswith("s") and word not in IMPERATIVES_IN_S
        if not word[:1].isupper() or word in NO_VERBS or ends_in_s != isinstance(node, ast.ClassDef):
            wrong.append(place)
    assert wrong == []
