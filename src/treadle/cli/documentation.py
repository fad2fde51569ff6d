"""`treadle docs`: the pages of the documentation, which are installed with the package."""

from __future__ import annotations

import argparse
import difflib
import re
import webbrowser
from pathlib import Path

from treadle.cli.console import Console
from treadle.cli.options import Commands, add_command
from treadle.core.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_EXAMPLES = """examples:
  treadle docs                      the start page: where to look for what
  treadle docs environments         the page on environments; `treadle docs environments | less` as Markdown
  treadle docs rewards              pages with a heading that has this word, if no page has the name
  treadle docs runs --path          where the page is installed
  treadle docs algorithms --open    in the browser: of the site, if `make docs` has built one in this clone
"""


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "docs", run_docs, "read the documentation of this version", _EXAMPLES)
    parser.add_argument("page", nargs="?", default="index", metavar="PAGE", help="a page, or a word of a heading")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--path", action="store_true", help="print the path of the page's file")
    how.add_argument("--open", action="store_true", help="open the page in the browser")


def pages() -> dict[str, Path]:
    """Return name -> file of every page: of the installed package, or of the clone that it runs from."""
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
    """List the headings that have the word, with the command that shows their page."""
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
