"""The notebooks in the repository are executed, small, and have more text than code."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
BYTES_MAX = 1_500_000
# A path or address of one machine; `(?<!...)` excludes parts of pictures, which are text, too.
MACHINE_PATH = re.compile(r"(?<![\w.+/])/(?:work|root|home|Users|tmp|usr|opt|dev|var|private)/\w")
ADDRESS = re.compile(r"127\.0\.0\.1:\d+|localhost:\d+")


def cells_of(path: Path, kind: str) -> list[dict]:
    """Return the cells of a kind."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def texts_of(cell: dict) -> list[str]:
    """Return the text and the outputs of a cell, except pictures."""
    texts = ["".join(cell["source"])]
    for output in cell.get("outputs", []):
        texts.append("".join(output.get("text", "")))
        data = output.get("data", {})
        texts += ["".join(data[kind]) for kind in data if kind.startswith("text/")]
    return texts


def test_seven_notebooks_exist_and_are_small():
    assert [path.name[:3] for path in PATHS] == ["01_", "02_", "03_", "04_", "05_", "06_", "07_"]
    assert sum(path.stat().st_size for path in PATHS) < BYTES_MAX


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_notebook_was_executed_from_top_to_bottom(path: Path):
    code = cells_of(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot"
    assert "".join(code[-1]["source"]).endswith("everything.close()")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_notebook_names_no_path_of_one_machine(path: Path):
    for cell in cells_of(path, "code") + cells_of(path, "markdown"):
        for text in texts_of(cell):
            assert not MACHINE_PATH.search(text), MACHINE_PATH.search(text)
            assert not ADDRESS.search(text), ADDRESS.search(text)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_notebook_has_more_text_than_code(path: Path):
    code, prose = cells_of(path, "code"), cells_of(path, "markdown")
    assert "".join(prose[0]["source"]).startswith("# ")
    assert len(prose) >= len(code) - 2  # two code cells may lack a text: the start and one plot
