"""Executes a notebook and reads its outputs, for the tests of the notebooks."""

import html
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import psutil
from nbclient import NotebookClient
from traitlets.config import Config

from tests.time_limits import TEST_TIMEOUT_S

NOTEBOOKS_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NOTEBOOK_NAMES = sorted(path.stem for path in NOTEBOOKS_FOLDER.glob("*.ipynb"))
CLUSTER_PROCESSES_MIN = 6  # at least: ZooKeeper, three storages, two servers
SLOW_MACHINE_WARNING = "server.silent "  # a warning that is true while other processes use all CPUs
_ROW = re.compile(r"<tr.*?</tr>", re.DOTALL)
_FIELD = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>", re.DOTALL)


class Notebook:
    """A notebook with its outputs."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.code = [cell for cell in node.cells if cell.cell_type == "code"]
        self.outputs = [output for cell in self.code for output in cell.outputs]

    def output(self) -> str:
        """Return the printed output."""
        return "".join(output.text for output in self.outputs if output.get("name") == "stdout")

    def errors(self) -> list[str]:
        """Return the errors, and the lines on stderr except the warnings of a slow machine."""
        stderr = [output.text for output in self.outputs if output.get("name") == "stderr"]
        lines = [line for text in stderr for line in text.splitlines()]
        wrong = [line for line in lines if not line.startswith(SLOW_MACHINE_WARNING)]
        return wrong + [output.evalue for output in self.outputs if output.output_type == "error"]

    def images(self) -> list[str]:
        """Return its pictures, in base64."""
        data = [output.get("data", {}) for output in self.outputs]
        return [each["image/png"] for each in data if "image/png" in each]

    def table(self, source: str) -> list[dict[str, str]]:
        """Return the table that the only cell with this source shows; the index is column ''."""
        (cell,) = [cell for cell in self.code if source in cell.source]
        data = [output.get("data", {}) for output in cell.outputs]
        (shown,) = [each["text/html"] for each in data if "text/html" in each]
        rows = [
            [html.unescape(field).strip() for field in _FIELD.findall(row)]
            for row in _ROW.findall(shown)
        ]
        names, *rest = rows
        if not any(rest[0][1:]):  # a second heading, which names the index
            names = [rest[0][0], *names[1:]]
            rest = rest[1:]
        return [dict(zip(names, row, strict=True)) for row in rest]

    def tables(self) -> list[str]:
        """Return all of its tables as text."""
        data = [output.get("data", {}) for output in self.outputs]
        return [each["text/plain"] for each in data if "text/html" in each]


class ExecutedNotebook(NamedTuple):
    """An executed notebook, and observations during its execution."""

    notebook: Notebook
    processes_max: int  # of its cluster, while it ran
    remaining_processes: list[str]
    remaining_directories: list[str]


def read_notebook(name: str) -> Notebook:
    """Return a notebook of the repository."""
    return Notebook(nbformat.read(NOTEBOOKS_FOLDER / f"{name}.ipynb", as_version=4))


def execute_notebook(name: str, directory: Path) -> ExecutedNotebook:
    """Execute a notebook from top to bottom in a separate directory."""
    working, temporary = directory / "cwd", directory / "tmp"
    working.mkdir()
    temporary.mkdir()
    # ipykernel does not redirect the output of child processes if it detects a test.
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    env |= {"PYSPARK_PYTHON": sys.executable, "TMPDIR": str(temporary)}
    node = nbformat.read(NOTEBOOKS_FOLDER / f"{name}.ipynb", as_version=4)
    for cell in node.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    counts = [0]
    # Unix sockets: another process can take a TCP port before the kernel binds it.
    sockets = tempfile.mkdtemp(prefix="kernel-")  # a short path: a socket's has 107 bytes at most
    config = Config({"ConnectionFileMixin": {"transport": "ipc", "ip": f"{sockets}/socket"}})
    client = NotebookClient(
        node,
        config=config,
        timeout=TEST_TIMEOUT_S,
        startup_timeout=TEST_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(working)}},
        on_cell_executed=lambda **_: counts.append(len(cluster_processes_under(temporary))),
    )
    try:
        client.execute(env=env)
    finally:
        remaining_processes = cluster_processes_under(temporary)
        shutil.rmtree(sockets)
    directories = [path.name for path in temporary.glob("waltz-*") if (path / "logs").exists()]
    return ExecutedNotebook(Notebook(node), max(counts), remaining_processes, directories)


def cluster_processes_under(temporary: Path) -> list[str]:
    """Return the command lines of the clusters' processes under a temporary directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if f"{temporary}/waltz-" in line:
            found.append(line)
    return found
