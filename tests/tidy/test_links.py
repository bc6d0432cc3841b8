"""Every link of the documentation has a target; URLs are well-formed.

The pages, the Markdown cells of the notebooks and the docstrings are parsed. So links in code
blocks are ignored, and reference-style links are found. Nothing is fetched from the network.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.tidy.sources import PROJECT_ROOT, fail_if_any, parse_source, read_text, tracked_files

MARKDOWN = MarkdownIt("commonmark").enable("table")
# `[text][name]` remains text if no line defines the name.
UNDEFINED = re.compile(r"\[[^\[\]]+\]\[[^\[\]]*\]")
HTML_LINK = re.compile(r"\b(?:href|src)=\"([^\"]*)\"")
HOST = re.compile(r"[\w-]+(\.[\w-]+)+(:\d+)?")


@cache
def inline_tokens(page: str) -> tuple[Token, ...]:
    """Return the parsed text of a page, with its headings, links and pictures."""
    return tuple(token for text in markdown_of(page) for token in MARKDOWN.parse(text))


def markdown_of(page: str) -> Iterator[str]:
    """Yield the Markdown of a page, of a notebook's cells, or of a module's docstrings."""
    text = read_text(page)
    if page.endswith(".md"):
        yield text
    elif page.endswith(".ipynb"):
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "markdown":
                yield "".join(cell["source"])
    elif "](" in text:
        for node in parse_source(page).nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def links_of(page: str) -> Iterator[str]:
    """Yield the targets of a page's links and pictures, and references that no line defines."""
    for token in inline_tokens(page):
        for each in (token, *(token.children or ())):
            if each.type in ("link_open", "image"):
                yield str(each.attrs["href" if each.type == "link_open" else "src"])
            elif each.type in ("html_block", "html_inline"):
                yield from HTML_LINK.findall(each.content)
            elif each.type == "inline":
                text = "".join(child.content for child in each.children if child.type == "text")
                yield from UNDEFINED.findall(text)


@cache
def anchors_of(page: str) -> frozenset[str]:
    """Return the anchors of a page's sections, as GitHub forms them."""
    tokens = inline_tokens(page)
    seen: Counter[str] = Counter()
    anchors = set()
    for heading, title in pairwise(tokens):
        if heading.type == "heading_open":
            words = "".join(each.content for each in title.children or ())
            anchor = re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")
            anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
            seen[anchor] += 1
    return frozenset(anchors)


def has_target(page: str, link: str) -> bool:
    """Return whether a link of a page is a well-formed URL, or has a file and a section."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return parts.scheme in ("http", "https") and bool(HOST.fullmatch(parts.netloc))
    folder = PROJECT_ROOT if page.endswith(".py") else (PROJECT_ROOT / page).parent
    target = (folder / unquote(parts.path)).resolve() if parts.path else PROJECT_ROOT / page
    if not parts.fragment:
        return target.exists()
    name = target.relative_to(PROJECT_ROOT).as_posix()
    return name.endswith(".md") and target.is_file() and parts.fragment in anchors_of(name)


def test_every_link_leads_to_an_existing_target() -> None:
    pages = [name for name in tracked_files() if name.endswith((".md", ".ipynb", ".py"))]
    links = [(page, link) for page in pages for link in links_of(page)]
    assert any(page.endswith(".ipynb") for page, _ in links)
    fail_if_any(
        [f"{page}: {link}" for page, link in links if not has_target(page, link)],
        "a link without a target",
    )


@pytest.mark.parametrize(
    "link",
    [
        "docs/missing",
        "docs/images/missing.png",
        "#no-such-section",
        "examples/bank.py#section",
        "https:/example.org/",
        "https://example",
        "htps://example.org",
        "[text][undefined]",
    ],
)
def test_a_broken_link_is_found(link: str) -> None:
    assert not has_target("README.md", link)
