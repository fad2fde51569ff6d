"""One HTML file with everything a page needs: it opens without a server, and reaches nothing.

    static/*.js --bundle--> one script     models --> answers, by the path that a page asks for

Its policy allows this very script, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from importlib.resources import files

from treadle.core.text import escape_line

_IMPORT = re.compile(r'^import \{([^}]*)\} from "(\.[^"]+)";\n', re.MULTILINE)
_DEFAULT_IMPORT = re.compile(r'^import (\w+) from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_EXPORTS = re.compile(r"export ?\{([^}]*)\};?\s*$")


def static_files() -> dict[str, bytes]:
    """Return what the pages are made of: name in `static/` -> content."""
    root = files("treadle.view") / "static"
    found = {entry.name: entry.read_bytes() for entry in root.iterdir() if entry.is_file()}
    vendored = (entry for entry in (root / "vendor").iterdir() if entry.is_file())
    return found | {f"vendor/{entry.name}": entry.read_bytes() for entry in vendored}


def export_page(title: str, route: str, answers: Mapping[str, str]) -> str:
    """Return the file's content. route: the page it opens at. answers: path -> JSON."""
    static = {name: content.decode() for name, content in static_files().items() if name.endswith((".js", ".css"))}
    script = bundle(static, "app.js").replace("</script", "<\\/script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = static["vendor/uPlot.min.css"] + static["style.css"]
    style_digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'sha256-{style_digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    embedded = f'{{"route": {json.dumps(route)}, "answers": {{'
    embedded += ", ".join(f"{json.dumps(path)}: {answer}" for path, answer in answers.items()) + "}}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escaped(escape_line(title))}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<script type="application/json" id="embedded">{_in_script(embedded)}</script>\n'
        f'<div id="app"></div>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def bundle(static: Mapping[str, str], entry: str) -> str:
    """Return a module and those that it imports as one script, each in a function of its own.

    The modules keep to the forms that this reads: `import {a} from "./b.js";` and `export function`, each on a line;
    vendored ones to one `export {...}` at their end.
    """
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        done[name] = ""
        text = static[name]
        folder = posixpath.dirname(name)
        places = {where: posixpath.normpath(posixpath.join(folder, where)) for _, where in _IMPORT.findall(text)}
        places |= {w: posixpath.normpath(posixpath.join(folder, w)) for _, w in _DEFAULT_IMPORT.findall(text)}
        for place in places.values():
            add(place)
        text = _IMPORT.sub(lambda m: f"const {{{_renamed(m[1])}}} = modules[{places[m[2]]!r}];\n", text)
        text = _DEFAULT_IMPORT.sub(lambda m: f"const {m[1]} = modules[{places[m[2]]!r}].default;\n", text)
        if found := _EXPORTS.search(text):
            given = [_reversed(part) for part in found[1].split(",") if part.strip()]
            text = text[: found.start()]
        else:
            given = [f"{own}: {own}" for own in _EXPORT.findall(text)]
            text = _EXPORT.sub("", text)
        del done[name]  # behind what it imports
        done[name] = f"modules[{name!r}] = (() => {{\n{text}\nreturn {{{', '.join(given)}}};\n}})();\n"

    add(entry)
    return '"use strict";\nconst modules = {};\n' + "".join(done.values())


def _renamed(names: str) -> str:
    return ", ".join(part.strip().replace(" as ", ": ") for part in names.split(",") if part.strip())


def _reversed(part: str) -> str:
    """Return `b: a` of `a as b`."""
    own, _, other = part.strip().partition(" as ")
    return f"{(other or own).strip()}: {own.strip()}"


def _in_script(text: str) -> str:
    """Return JSON that cannot end the element that holds it."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
