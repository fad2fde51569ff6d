"""`treadle docs`: the documentation pages installed with the package."""

from __future__ import annotations

import argparse
import difflib
import re
import webbrowser
from pathlib import Path

from treadle.cli.console import Console
from treadle.core.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def pages() -> dict[str, Path]:
    """Return name -> file of every page: of the installed package, or of the clone it runs from."""
    installed = _PACKAGE / "docs"
    folder = installed if installed.is_dir() else _PACKAGE.parents[1] / "docs"
    return {path.stem: path for path in sorted(folder.glob("*.md"))}


def run_docs(options: argparse.Namespace) -> int:
    console, every = Console(), pages()
    name = options.page.removesuffix(".md")
    if name not in every:
        return _find(console, every, options.page)
    if options.path:
        console.line(str(every[name]))
    elif options.open:
        built = every[name].parents[1] / "site" / f"{name}.html"
        webbrowser.open((built if built.is_file() else every[name]).as_uri())
    elif console.is_terminal:
        from rich.markdown import Markdown

        console.rich.print(Markdown(every[name].read_text(encoding="utf-8"), hyperlinks=False))
    else:
        console.verbatim(every[name].read_text(encoding="utf-8"))
    return 0


def _find(console: Console, every: dict[str, Path], word: str) -> int:
    """List the headings with the word, and the command that shows their page."""
    found = False
    for name, path in every.items():
        for heading in re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            if word.lower() in heading.lower():
                console.line(f"treadle docs {name:20}{heading}")
                found = True
    if not found:
        near = difflib.get_close_matches(word, every, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no page and no heading is called {word!r}; {meant}the pages: {', '.join(every)}")
    return 0
