"""The documentation site of `make site`: it is complete, and has no warnings and no dead links."""

import json
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import waltz_core.client
import waltz_spark

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page.relative_to(ROOT).with_suffix("").as_posix()
    for page in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples" / "notebooks").glob("*.ipynb"),
    )
    if page.stem != "navigation"
)


class Links(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {"", "top"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses and names of a tag."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.append(values["href"])
        elif "src" in values:
            self.loads.append(values["src"])


@cache
def links_of(path: Path) -> Links:
    parser = Links()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


@pytest.fixture(scope="module")
def html(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def broken(site: Path, path: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere within the site."""
    links = links_of(path)
    for link in (*links.links, *links.loads):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file():
            yield f"{path.relative_to(site)}: {link}"
        elif target.suffix == ".html" and unquote(parts.fragment) not in links_of(target).anchors:
            yield f"{path.relative_to(site)}: {link} (no such heading)"


def test_every_link_leads_to_a_page_and_its_heading(site: Path, html: list[Path]) -> None:
    assert [each for path in html for each in broken(site, path)] == []
    assert sum(len(links_of(path).links) for path in html) > 1000


def test_every_page_is_reached_from_the_navigation(site: Path) -> None:
    """Pages are reached by the links of the side bar, and of pages that list other pages."""
    reached, waiting = set(), ["index.html"]
    while waiting:
        page = waiting.pop()
        text = (site / page).read_text(encoding="utf-8")
        listed = re.findall(r'<a class="reference internal" href="([^"#]+\.html)[^"]*"', text)
        for link in listed:
            target = (site / page).parent / link
            name = target.resolve().relative_to(site.resolve()).as_posix()
            if name not in reached:
                reached.add(name)
                waiting.append(name)
    assert {f"{page}.html" for page in PAGES} - reached == set()


def test_the_start_page_is_the_readme(site: Path) -> None:
    assert (site / "index.html").read_text() == (site / "README.html").read_text()


def test_the_search_finds_terms(site: Path) -> None:
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    pages = [index["docnames"][number] for number in index["terms"]["fdatasync"]]
    assert "docs/crash-safety" in pages


@pytest.mark.parametrize("package", [waltz_core.client, waltz_spark])
def test_every_public_name_is_described(site: Path, package: object) -> None:
    pages = (site / "docs" / "site" / "api").glob("*.html")
    described = {name for page in pages for name in links_of(page).anchors}
    wanted = {f"{package.__name__}.{name}" for name in package.__all__}
    assert wanted - described == set()


def api_page(site: Path, name: str) -> str:
    return (site / "docs" / "site" / "api" / f"{name}.html").read_text(encoding="utf-8")


def text_in(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", "", page).split())


def test_docstrings_are_shown_with_rules_examples_and_names(site: Path) -> None:
    contexts = api_page(site, "contexts")
    assert "A transaction that the application computes again when" in text_in(contexts)
    assert re.search(r"<ol[^>]*>\s*<li><p>A lock is a name and a key", contexts)
    assert 'class="highlight-python' in api_page(site, "memory_waltz")
    assert "settings with _ for ., or as a dict" in text_in(api_page(site, "spark"))


def test_notebooks_are_shown_with_their_outputs(site: Path) -> None:
    folder = site / "examples" / "notebooks"
    for path in folder.glob("*.html"):
        assert 'class="cell_output' in path.read_text(encoding="utf-8"), path.name
    assert len(list(folder.glob("*.html"))) == 7


def test_no_page_loads_files_from_other_hosts(html: list[Path]) -> None:
    loads = [load for path in html for load in links_of(path).loads]
    assert [load for load in loads if urlsplit(load).netloc] == []
    assert len(loads) > 500
