"""The documentation site (mkdocs.yml): what its pages need beyond Markdown, all of it when it is built."""

from __future__ import annotations

import html
import re
from typing import Any

import griffe
from latex2mathml.converter import convert
from pymdownx.slugs import slugify

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")  # a link to a file of the repository that is no page
_NAME = re.compile(r"^\| `(treadle\.[\w.]+)`(?= \| [^`])", re.MULTILINE)  # not the groups of entry points
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_CELL = re.compile(r"<td.*?</td>", re.DOTALL)
_CODE = re.compile(r"<code>[^<]*</code>")
_ALIGNED = re.compile(r"\S {2,}\S")


def on_config(config: Any) -> Any:
    """Give headings the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leave out links to files that are no pages; on the page of the API, add docstrings."""
    if page.file.src_uri in ("index.md", "api.md"):
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri == "api.md":
        details = "".join(f"\n::: {name}\n" for name in _NAME.findall(markdown))
        markdown = _NAME.sub(r"| [`\1`][\1]", markdown) + f"\n## Details\n{details}"
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers show without a script; let long keys in tables break at their dots."""
    content = _CELL.sub(lambda cell: _CODE.sub(_breaking, cell[0]), content)
    return _MATH.sub(_mathml, content)


def _breaking(code: re.Match[str]) -> str:
    return re.sub(r"(?<=\w)([._])(?=\w)", r"<wbr>\1" if "." in code[0] else r"\1<wbr>", code[0])


def _mathml(match: re.Match[str]) -> str:
    return convert(html.unescape(match[2]), display="block" if match[1] == "div" else "inline")


class Docstrings(griffe.Extension):
    """Lays docstrings out as Markdown: a paragraph for each parameter or field, blocks for examples and tables."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        names = {parameter.name for parameter in getattr(obj, "parameters", ())} | set(obj.members)
        if obj.is_class:
            names |= {parameter.name for parameter in getattr(obj.members.get("__init__"), "parameters", ())}
        paragraphs = obj.docstring.value.split("\n\n")
        obj.docstring.value = "\n\n".join(_laid_out(paragraph, names) for paragraph in paragraphs)


def _laid_out(paragraph: str, names: set[str]) -> str:
    if paragraph.startswith(">>>"):
        return f"```pycon\n{paragraph}\n```"
    if paragraph.startswith(" "):
        return paragraph
    if _ALIGNED.search(paragraph):
        return f"```text\n{paragraph}\n```"
    known = "|".join(map(re.escape, sorted(names - {"None"}, key=len, reverse=True)))
    if not known:
        return paragraph
    start = re.compile(rf"(?:^|(?<=[.;)]) |\n)((?:{known})(?:, (?:{known}))*)((?: [\w\[\], ]+)?): ")
    return start.sub(r"\n\n**\1**\2: ", paragraph).lstrip("\n")
