"""Sphinx extension: a link to a file that is not a page leads to the file's source.

`[counter](examples/counter.py)` leads to a page with the highlighted file. A link to a folder leads
to a list of the folder's files.
"""

import posixpath
from collections.abc import Iterator
from html import escape
from typing import Any

from docutils import nodes
from pygments.lexers import find_lexer_class_for_filename
from sphinx import addnodes
from sphinx.application import Sphinx

# folder -> the page that introduces it
INTRODUCTION_PAGES = {"docs/decisions": "docs/site/decisions"}
PREFIX = "source"


def forget_links(app: Sphinx, *_: object) -> None:
    """Forget the links of an earlier build."""
    app.env.linked_sources = set()  # type: ignore[attr-defined]


def link(app: Sphinx, document: nodes.document) -> None:
    """Replace a page's links to files and folders."""
    page = app.env.docname
    for node in list(document.findall(nodes.Element)):
        is_file = isinstance(node, addnodes.download_reference)
        if not is_file and node.get("reftype") != "myst":
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), node["reftarget"]))
        if is_file or (app.srcdir / path).is_dir():
            uri = app.builder.get_relative_uri(page, target_of(app, path))
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def target_of(app: Sphinx, path: str) -> str:
    """Return the page of a file or a folder; if there is none, the page with its source."""
    page = INTRODUCTION_PAGES.get(path) or app.env.path2doc(path)
    if page in app.env.found_docs:
        return page
    if path not in app.env.linked_sources:  # type: ignore[attr-defined]
        app.env.linked_sources.add(path)  # type: ignore[attr-defined]
        for name in names_in(app, path):
            target_of(app, f"{path}/{name}")
    return f"{PREFIX}/{path}"


def names_in(app: Sphinx, path: str) -> list[str]:
    """Return the names in a folder, except hidden and generated ones; an empty list for a file."""
    folder = app.srcdir / path
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return sorted(name for name in names if not name.startswith((".", "_")))


def linked_source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the pages with the sources that other pages link."""
    for path in sorted(app.env.linked_sources):  # type: ignore[attr-defined]
        page = f"{PREFIX}/{path}"
        if (app.srcdir / path).is_dir():
            links = [
                f'<li><a href="{app.builder.get_relative_uri(page, target_of(app, target))}">'
                f"{escape(name)}</a></li>"
                for name in names_in(app, path)
                for target in [f"{path}/{name}"]
            ]
            body = f"<ul>{''.join(links)}</ul>"
        else:
            text = (app.srcdir / path).read_text(encoding="utf-8")
            lexer = find_lexer_class_for_filename(path)
            # `force`, because the lexer is guessed from the file name, and the text may be invalid
            # for it: the name of a template of SQL also ends with .sql.
            body = app.builder.highlighter.highlight_block(
                text, lexer.aliases[0] if lexer else "text", force=True
            )
        yield page, {"title": path, "body": f"<h1>{escape(path)}</h1>{body}"}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions of this file."""
    app.connect("env-before-read-docs", forget_links)
    # Before Sphinx copies the linked files as downloads.
    app.connect("doctree-read", link, priority=400)
    app.connect("html-collect-pages", linked_source_pages)
    return {"parallel_read_safe": False}
