"""Write what is generated: the samples in `conf/`, the tables in two pages of `docs/`.

Why it stands alone: a test runs `generated()` and compares, so that no sample and no table can
drift from the code that it describes.
"""

import sys
from pathlib import Path

from waltz_core.cluster.nodes.paths import ZNODES
from waltz_core.config import KINDS
from waltz_core.config.settings import sample_toml
from waltz_core.local.zookeeper_process import zookeeper_config
from waltz_core.ops.findings import KINDS as FINDINGS
from waltz_spark.option_table import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
OPTIONS_BEGIN = "<!-- options: written by `make docs` from waltz_spark/option_table.py -->"
OPTIONS_END = "<!-- /options -->"
NODES_BEGIN = "<!-- nodes: written by `make docs` from waltz_core/cluster/nodes/paths.py -->"
NODES_END = "<!-- /nodes -->"
FINDINGS_BEGIN = "<!-- findings: written by `make docs` from waltz_core/ops/findings.py -->"
FINDINGS_END = "<!-- /findings -->"

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
    texts[ROOT / "docs" / "spark.md"] = spark_page()
    texts[ROOT / "docs" / "zookeeper.md"] = zookeeper_page()
    texts[ROOT / "docs" / "doctor.md"] = doctor_page()
    return texts


def doctor_page() -> str:
    """Return docs/doctor.md with the table of findings as the code has it."""
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    head, mark, rest = page.partition(FINDINGS_BEGIN)
    _, end, tail = rest.partition(FINDINGS_END)
    assert mark, "docs/doctor.md has no place for the findings"
    assert end, "docs/doctor.md has no end of the findings"
    rows = [
        f"| {number} | {each.area.value} | `{each.name}` | {each.sentence} | `{each.command}` |"
        for number, each in enumerate(FINDINGS.values(), 1)
    ]
    titles = ["| | about | name | sentence | command |", "|---|---|---|---|---|"]
    return head + mark + "\n\n" + "\n".join([*titles, *rows]) + "\n\n" + end + tail


def zookeeper_page() -> str:
    """Return docs/zookeeper.md with the table of nodes as the code has it."""
    page = (ROOT / "docs" / "zookeeper.md").read_text(encoding="utf-8")
    head, mark, rest = page.partition(NODES_BEGIN)
    _, end, tail = rest.partition(NODES_END)
    assert mark, "docs/zookeeper.md has no place for the nodes"
    assert end, "docs/zookeeper.md has no end of the nodes"
    rows = [f"| `{n.path}` | {n.kind} | {n.content} | {n.written_by} |" for n in ZNODES]
    table = ["| node | kind | content | written by |", "|---|---|---|---|", *rows]
    return head + mark + "\n\n" + "\n".join(table) + "\n\n" + end + tail


def spark_page() -> str:
    """Return docs/spark.md with the table of options as the code has them."""
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    head, mark, rest = page.partition(OPTIONS_BEGIN)
    _, end, tail = rest.partition(OPTIONS_END)
    assert mark, "docs/spark.md has no place for the options"
    assert end, "docs/spark.md has no end of the options"
    rows = [
        f"| `{option.name}` | {option.use.value} | {option.default} | {option.text} |"
        for option in OPTIONS
    ]
    table = ["| option | for | default | |", "|---|---|---|---|", *rows]
    return head + mark + "\n\n" + "\n".join(table) + "\n\n" + end + tail


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
