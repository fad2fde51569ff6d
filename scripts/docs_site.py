"""Hooks of the documentation site (mkdocs.yml): what its pages need beyond Markdown, all of it at build time."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert
from pymdownx.slugs import slugify

_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./[^)]*\)")  # a link to a file of the repository that is no page
_NAME = re.compile(r"^### `(treadle\.[\w.]+)`$", re.MULTILINE)
_MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    """Give headings the anchors that GitHub gives them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leave out links to files that are no pages; on the page of the API, put each name's docstring below it."""
    if page.file.src_uri == "api.md":
        markdown = _NAME.sub(r"\g<0>\n\n::: \g<1>\n", markdown)
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Write formulas as MathML, which browsers show without a script."""
    return _MATH.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    return convert(html.unescape(match[2]), display="block" if match[1] == "div" else "inline")
