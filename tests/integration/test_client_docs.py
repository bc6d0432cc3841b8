"""Runs the snippets of docs/client.md in order, as one program, against a local cluster."""

import re
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.schema_registry import run_schema_registry
from waltz_core.local import running_cluster

ROOT = Path(__file__).resolve().parents[2]
CONNECT = "zk1:2181,zk2:2181/waltz/payments"
REGISTRY = "http://registry:8081"
# A comment `<!-- python ... -->` of the page is executed as well. It waits, or checks results.
SNIPPET = re.compile(r"^```python\n(.*?)^```$|^<!-- python\n(.*?)^-->$", re.MULTILINE | re.DOTALL)


def snippets(page: str) -> list[tuple[int, str]]:
    """Return the line and the text of each."""
    return [
        (page.count("\n", 0, match_.start()) + 2, match_[1] or match_[2])
        for match_ in SNIPPET.finditer(page)
    ]


def test_every_snippet_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    found = snippets(page)
    assert len(found) == page.count("```python") + page.count("<!-- python")
    assert len(found) >= 15
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "snippets"}
    with (
        run_schema_registry() as registry,
        running_cluster(tmp_path / "local", storage_count=1, server_count=1) as cluster,
    ):
        try:
            for line, text in found:
                # An error is shown at its line of the page.
                code = text.replace(CONNECT, cluster.connect).replace(REGISTRY, registry.url)
                code = code.replace("port=9404", f"port={free_port()}")
                source = "\n" * (line - 1) + code
                exec(compile(source, ROOT / "docs/client.md", "exec"), names)
        finally:
            client = names.get("client")
            if client is not None:
                client.close()
