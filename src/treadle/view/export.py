"""One HTML file with everything a page needs: it opens without a server and makes no request.

static/*.js --import map of data: URLs-->  the same modules     answers --JSON-->  what a page asks the server for
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files

from treadle.core.text import escape_line

_ENTRY = 'import "pages/app.js";'


def static_files() -> dict[str, bytes]:
    """Return the pages' files: name below `static/` -> content."""
    root = files("treadle.view") / "static"
    pages = {entry.name: entry.read_bytes() for entry in root.iterdir() if entry.is_file()}
    return pages | {f"vendor/{entry.name}": entry.read_bytes() for entry in (root / "vendor").iterdir()}


def export_page(title: str, route: str, answers: Mapping[str, str]) -> str:
    """Return the file's content. route: the page it opens at. answers: path -> JSON."""
    static = static_files()
    modules = {
        f"pages/{name}": f"data:text/javascript;base64,{b64encode(content).decode()}"
        for name, content in static.items()
        if name.endswith(".js")
    }
    import_map = json.dumps({"imports": modules})
    style = (static["vendor/uPlot.min.css"] + static["style.css"]).decode()
    policy = (
        f"default-src 'none'; script-src {_hash(import_map)} {_hash(_ENTRY)} data:; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    held = ", ".join(f"{json.dumps(path)}: {answer}" for path, answer in answers.items())
    embedded = f'{{"route": {json.dumps(route)}, "answers": {{{held}}}}}'
    embedded = embedded.replace("<", "\\u003c")  # it must not end the element that holds it
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(escape_line(title))}</title>\n<style>{style}</style>\n"
        f'<script type="importmap">{import_map}</script>\n</head>\n<body>\n'
        f'<script type="application/json" id="embedded">{embedded}</script>\n'
        f'<div id="app"></div>\n<script type="module">{_ENTRY}</script>\n</body>\n</html>\n'
    )


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
