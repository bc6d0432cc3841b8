"""Sphinx settings of the documentation site; `make site` builds it into `build/site/`.

Sphinx's source directory is the root of the repository. So no page has to be moved, and the links
between pages also work on a code host.
"""

import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

from waltz_core import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the extensions of this folder

project = "Waltz for Spark"
author = "the authors of Waltz for Spark"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "docstrings",
    "source_pages",
]
include_patterns = ["*.md", "docs/**.md", "examples/notebooks/*.ipynb"]
exclude_patterns = [
    *(".*", "build", "dist", "tests", "scripts", "conf", "waltz_*", "docs/site/navigation.md"),
    "**/.ipynb_checkpoints",
]
root_doc = "README"
# The anchor of a heading is its text in lower case, with hyphens, as on a code host.
myst_heading_anchors = 4
# Notebooks are shown as they are committed.
nb_execution_mode = "off"
highlight_language = "text"

# Of single backticks in docstrings; see docstrings.py.
default_role = "py:obj"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
# A fixture of the real pytest is no function.
autodoc_mock_imports = ["pytest"]
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"Waltz {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def add_navigation(app: Sphinx, page: str, text: list[str]) -> None:
    """Append the table of contents to the start page; omit patterns that match no page."""
    if page == root_doc:
        lines = (HERE / "navigation.md").read_text(encoding="utf-8").splitlines()
        found = [line for line in lines if "*" not in line or any(app.srcdir.glob(f"{line}.md"))]
        text[0] += "\n".join(["", *found, ""])


def copy_start_page(app: Sphinx, error: Exception | None) -> None:
    """Make the start page available under the name that web servers look for."""
    if error is None:
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the functions of this file."""
    app.connect("source-read", add_navigation)
    app.connect("build-finished", copy_start_page)
