"""Write what is generated: samples in `conf/`, tables in `docs/`, layers in ARCHITECTURE.md.

Why it stands alone: a test runs `generated()` and compares, so that no sample and no table can
drift from the code that it describes.
"""

import ast
import sys
import tomllib
from pathlib import Path

from waltz_core.cluster.nodes.paths import ZNODES
from waltz_core.config import KINDS
from waltz_core.config.settings import sample_toml
from waltz_core.local.zookeeper_process import zookeeper_config
from waltz_core.ops.findings import KINDS as FINDINGS
from waltz_spark.option_table import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
LOGGING = """\
# What is logged and where, as Python's logging.config.dictConfig takes it.
# Used by: waltz-core --logging conf/logging.toml COMMAND

version = 1
disable_existing_loggers = false

[formatters.line]
format = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"
datefmt = "%Y-%m-%dT%H:%M:%S"

[handlers.stderr]
class = "logging.StreamHandler"
stream = "ext://sys.stderr"
formatter = "line"

# INFO: a person wants it once. WARNING: someone should look. ERROR: a guarantee is touched.
[root]
level = "INFO"
handlers = ["stderr"]

# DEBUG here is the replay log: every event and effect of every state machine.
[loggers."waltz_core.driver"]
level = "INFO"

# INFO or WARNING: kazoo logs each attempt to connect, several a second while ZooKeeper is away.
[loggers."waltz_core.kazoo"]
level = "ERROR"
"""

SPARK = """\
# Spark settings that go well with Waltz; copy what you like into $SPARK_HOME/conf/.
# `waltz_spark.session()` sets them by itself.

# Tasks of Python sources start in 20 ms rather than 50.
spark.python.unix.domain.socket.enabled  true

# commit_time is told in this zone; the log itself has UTC milliseconds.
spark.sql.session.timeZone  UTC

# Rows that a write task gets at once, and so the size of its append batches.
spark.sql.execution.arrow.maxRecordsPerBatch  10000

# Workers stay alive between tasks, and with them their connections. This is the default.
spark.python.worker.reuse  true

# NB: the workers' Python is no setting here: set PYSPARK_PYTHON to the one that has waltz-spark.
"""


def zoo_cfg() -> str:
    """Return the sample for `waltz-core zookeeper run`."""
    head = (
        "# One ZooKeeper node on this machine, for development: waltz-core zookeeper run\n"
        "# A production cluster has three or five; see ZooKeeper's own guide.\n"
    )
    return head + zookeeper_config(Path("data/zookeeper"), 2181)


def generated() -> dict[Path, str]:
    """Return every generated file with the text that it should have."""
    texts = {
        ROOT / "conf" / "zoo.cfg": zoo_cfg(),
        ROOT / "conf" / "logging.toml": LOGGING,
        ROOT / "conf" / "spark-defaults.conf": SPARK,
    }
    for kind, config_type in KINDS.items():
        texts[ROOT / "conf" / f"{kind}.toml"] = sample_toml(config_type)
    for place, (name, text) in {
        "docs/spark.md": ("options", options()),
        "docs/zookeeper.md": ("nodes", nodes()),
        "docs/doctor.md": ("findings", findings()),
        "ARCHITECTURE.md": ("layers", layers()),
    }.items():
        texts[ROOT / place] = filled(ROOT / place, name, text)
    return texts


def filled(path: Path, name: str, text: str) -> str:
    """Return a page with a text between its marks `<!-- name: ... -->` and `<!-- /name -->`."""
    page = path.read_text(encoding="utf-8")
    head, mark, rest = page.partition(f"<!-- {name}: ")
    source, close, rest = rest.partition(" -->")
    _, end, tail = rest.partition(f"<!-- /{name} -->")
    assert end, f"{path.name} has no place for the {name}"
    return f"{head}{mark}{source}{close}\n\n{text}\n\n{end}{tail}"


def findings() -> str:
    """Return the table of findings."""
    rows = [
        f"| {number} | {each.area.value} | `{each.name}` | {each.sentence} | `{each.command}` |"
        for number, each in enumerate(FINDINGS.values(), 1)
    ]
    return "\n".join(["| | about | name | sentence | command |", "|---|---|---|---|---|", *rows])


def nodes() -> str:
    """Return the table of ZooKeeper's nodes."""
    rows = [f"| `{n.path}` | {n.kind} | {n.content} | {n.written_by} |" for n in ZNODES]
    return "\n".join(["| node | kind | content | written by |", "|---|---|---|---|", *rows])


def options() -> str:
    """Return the table of Spark options."""
    rows = [
        f"| `{option.name}` | {option.use.value} | {option.default} | {option.text} |"
        for option in OPTIONS
    ]
    return "\n".join(["| option | for | default | |", "|---|---|---|---|", *rows])


def layers() -> str:
    """Return the layers of the import contracts, each package with its first sentence."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    drawn = [drawing(each) for each in contracts if each["type"] == "layers"]
    return "```\n" + "\n\n".join(drawn) + "\n```"


def drawing(contract: dict[str, list[str]]) -> str:
    """Return the lines of one contract; packages of one layer share its number."""
    (container,) = contract["containers"]
    names = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    width = max(len(name) for layer in names for name in layer)
    lines = [f"{container}"]
    for number, layer in zip(range(len(names), 0, -1), names, strict=True):
        for name in layer:
            shown = str(number) if name == layer[0] else ""
            lines.append(f"{shown:>4}  {name:{width}}  {summary(container, name)}".rstrip())
    return "\n".join(lines)


def summary(container: str, name: str) -> str:
    """Return the first line of a package's or module's docstring."""
    place = ROOT / container.replace(".", "/") / name
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def drifted() -> list[str]:
    """Return the generated files that do not have the text that they should have."""
    return [
        str(path.relative_to(ROOT))
        for path, text in sorted(generated().items())
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write what has drifted, or only name it with `--check`; return the exit code."""
    stale = drifted()
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"{name}: not up to date, run make docs")
        return 1 if stale else 0
    for name in stale:
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(generated()[path], encoding="utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
