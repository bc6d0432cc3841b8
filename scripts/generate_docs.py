"""Generate the samples in `conf/`, the tables in `docs/` and the layers in ARCHITECTURE.md.

A test compares the files with `generated_files()`, so that the files always match the code. The
tables of `docs/reference/` are in the package `reference`.
"""

import ast
import dataclasses
import sys
import tomllib
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from scripts.dashboards import dashboards
from scripts.reference import (
    alerts,
    commands,
    errors,
    events,
    metrics,
    permissions,
    settings,
    spark_options,
)
from scripts.reference.markdown import table
from waltz_core.cluster.znodes import model
from waltz_core.cluster.znodes.paths import ZNODES
from waltz_core.config import CONFIG_TYPES_BY_KIND
from waltz_core.config.settings import sample_toml
from waltz_core.errors import ERROR_CLASSES_BY_CODE
from waltz_core.local.zookeeper_process import zookeeper_config
from waltz_core.ops.findings import FINDING_KINDS as FINDINGS
from waltz_core.records import lock_blocks
from waltz_core.records.byte_layout import ByteLayout
from waltz_core.records.raw_records import PREFIX_DTYPE
from waltz_core.storage.files import format as files
from waltz_core.storage.log import removal
from waltz_core.wire import admin_messages, messages
from waltz_core.wire.messages import FieldKind, Message, WireProtocol

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LOGGING_SAMPLE = """\
# Log levels and outputs, in the format of Python's logging.config.dictConfig.
# Used by: waltz-core --logging conf/logging.toml COMMAND

version = 1
disable_existing_loggers = false

[formatters.line]
format = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"
datefmt = "%Y-%m-%dT%H:%M:%S"

[formatters.json]
"()" = "waltz_core.log_lines.JsonFormatter"

# The formatter "json" writes one JSON object per line.
[handlers.stderr]
class = "logging.StreamHandler"
stream = "ext://sys.stderr"
formatter = "line"

# INFO: events. WARNING: an operator should look. ERROR: a guarantee is at risk.
[root]
level = "INFO"
handlers = ["stderr"]

# DEBUG logs every event and effect of every state machine.
[loggers."waltz_core.driver"]
level = "INFO"

# DEBUG logs each append with its request IDs, at a server and at a storage (docs/operations.md).
[loggers."waltz_core.server.process.clients"]
level = "INFO"
[loggers."waltz_core.storage.process.append_lines"]
level = "INFO"

# INFO or WARNING: kazoo logs each attempt to connect, several per second without ZooKeeper.
[loggers."waltz_core.kazoo"]
level = "ERROR"
"""

SPARK_SAMPLE = """\
# Spark settings for Waltz; copy them into $SPARK_HOME/conf/.
# `waltz_spark.session()` sets them by itself.

# Tasks of Python sources start in 20 ms instead of 50.
spark.python.unix.domain.socket.enabled  true

# commit_time is shown in this zone; the log stores UTC milliseconds.
spark.sql.session.timeZone  UTC

# Rows that a write task gets at once, and the size of its append batches.
spark.sql.execution.arrow.maxRecordsPerBatch  10000

# Workers stay alive between tasks, and with them their connections. This is the default.
spark.python.worker.reuse  true

# NB: the workers' Python is not a setting: set PYSPARK_PYTHON to a Python with waltz-spark.
"""


def zoo_cfg() -> str:
    """Return the sample for `waltz-core zookeeper run`."""
    head = (
        "# One ZooKeeper node on this machine, for development: waltz-core zookeeper run\n"
        "# A production cluster has three or five; see ZooKeeper's guide.\n"
    )
    return head + zookeeper_config(Path("data/zookeeper"), 2181)


def generated_files() -> dict[Path, str]:
    """Return every generated file with its expected text."""
    texts = {
        ROOT / "conf" / "zoo.cfg": zoo_cfg(),
        ROOT / "conf" / "logging.toml": LOGGING_SAMPLE,
        ROOT / "conf" / "spark-defaults.conf": SPARK_SAMPLE,
    }
    texts |= {ROOT / "conf" / "grafana" / name: text for name, text in dashboards().items()}
    for kind, config_type in CONFIG_TYPES_BY_KIND.items():
        texts[ROOT / "conf" / f"{kind}.toml"] = sample_toml(config_type)
    for file_name, tables in {
        "docs/reference/commands.md": commands.sections(),
        "docs/reference/errors.md": errors.tables(),
        "docs/reference/events.md": events.tables(),
        "docs/reference/metrics.md": metrics.tables(),
        "docs/reference/permissions.md": permissions.tables(),
        "docs/reference/settings.md": settings.tables(),
        "docs/reference/spark-options.md": spark_options.tables(),
        "docs/alerts.md": {"alerts": alerts.table_of_alerts()},
        "docs/zookeeper.md": {"nodes": znode_table(), "values": node_values()},
        "docs/doctor.md": {"findings": finding_table()},
        "docs/design/wire-format.md": wire_tables(),
        "docs/design/disk-format.md": disk_tables(),
        "ARCHITECTURE.md": {"layers": layer_diagrams()},
    }.items():
        path = ROOT / file_name
        texts[path] = path.read_text(encoding="utf-8")
        for name, text in tables.items():
            texts[path] = fill_section(path, name, text, page=texts[path])
    return texts


def fill_section(path: Path, name: str, text: str, *, page: str | None = None) -> str:
    """Return a page with a text between its marks `<!-- name: ... -->` and `<!-- /name -->`.

    `page` is the text so far, if it differs from the file's.
    """
    page = path.read_text(encoding="utf-8") if page is None else page
    head, opening, remaining = page.partition(f"<!-- {name}: ")
    source, close, remaining = remaining.partition(" -->")
    _, end, after = remaining.partition(f"<!-- /{name} -->")
    assert end, f"{path.name} has no section for the {name}"
    return f"{head}{opening}{source}{close}\n\n{text}\n\n{end}{after}"


def finding_table() -> str:
    """Return the table of findings."""
    rows = [
        f"| {number} | {finding.area.value} | `{finding.name}` | {finding.sentence} |"
        f" `{finding.command}` |"
        for number, finding in enumerate(FINDINGS.values(), 1)
    ]
    return "\n".join(["| | about | name | sentence | command |", "|---|---|---|---|---|", *rows])


def znode_table() -> str:
    """Return the table of ZooKeeper's nodes."""
    rows = [
        f"| `{n.path}` | {n.kind} | {n.content} | {n.written_by} | {n.readers.value} | "
        f"{f'`{n.members}`' if n.members else 'nothing'} |"
        for n in ZNODES
    ]
    head = "| znode | kind | content | written by | readers | members may |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def node_values() -> str:
    """Return the table of the nodes' values, with their bytes."""
    rows = [
        (node_class.__name__, line.strip().removeprefix("Node "))
        for node_class in vars(model).values()
        if isinstance(node_class, type)
        for line in (node_class.__doc__ or "").splitlines()
        if line.strip().startswith("Node `R")
    ]
    return table(("value", "node and bytes"), rows)


def wire_tables() -> dict[str, str]:
    """Return the tables of the wire format."""
    return {
        "protocols": protocol_table(),
        "field-kinds": field_kind_table(),
        "client-messages": message_table(WireProtocol.CLIENT, messages.ClientMessage),
        "storage-messages": message_table(WireProtocol.STORAGE, messages.StorageMessage),
        "admin-messages": message_table(WireProtocol.ADMIN, admin_messages.AdminMessage),
        "reasons": enum_members(messages.RowOutcomeCode),
        "mount-states": enum_members(messages.MountState),
        "range-forms": enum_members(messages.RangeForm),
        "error-codes": error_codes(),
    }


def protocol_table() -> str:
    """Return the table of protocols."""
    rows = [
        (
            f"`{chr(each.magic)}`",
            each.name.lower(),
            ", ".join(map(str, each.versions_accepted)),
            ", ".join(map(str, each.versions_offered)),
            each.listener_text,
            each.dialler_text,
        )
        for each in WireProtocol
    ]
    head = ("magic", "protocol", "a listener accepts", "a dialer offers")
    return table((*head, "text of the listener's hello", "text of the dialer's hello"), rows)


def field_kind_table() -> str:
    """Return the table of the kinds of fields."""
    return table(("kind", "layout"), [(each.name, each.value) for each in FieldKind])


def message_table(protocol: WireProtocol, prefix: type[Message]) -> str:
    """Return the messages of a protocol by code, without the fields of `prefix`."""
    classes = [
        value
        for module in (messages, admin_messages)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, prefix) and hasattr(value, "code")
    ]
    rows = [
        (each.code, each.__name__, versions_of(each), fields_of(each, prefix), first_line(each))
        for each in sorted(classes, key=lambda each: (each.code, each.since))
    ]
    assert all(each.protocol is protocol for each in classes)
    return table(("code", "message", "versions", "fields", ""), rows)


def versions_of(message: type[Message]) -> str:
    """Return the versions of its protocol in which a message exists."""
    since = max(message.since, message.protocol.versions[0])
    return f"{since}+" if message.until is None else f"{since}-{message.until}"


def fields_of(message: type[Message], prefix: type[Message]) -> str:
    """Return the fields of a message in wire order, with their kinds."""
    prefixed = {field.name for field in dataclasses.fields(prefix)}
    hints = get_type_hints(message, include_extras=True)
    texts = []
    for field in dataclasses.fields(message):
        if field.name not in prefixed:
            number = field.metadata.get("since", 0)
            since = f" (since {number})" if number > message.since else ""
            texts.append(f"`{field.name}` {hints[field.name].__metadata__[0].name}{since}")
    return ", ".join(texts) or "none"


def enum_members(enum: type[IntEnum]) -> str:
    """Return the values of an enumeration."""
    return table(("value", "name"), [(each.value, each.name) for each in enum])


def error_codes() -> str:
    """Return the errors that cross the wire, by code."""
    rows = [
        (code, each.__name__, first_line(each))
        for code, each in sorted(ERROR_CLASSES_BY_CODE.items())
    ]
    return table(("code", "error", ""), rows)


def first_line(documented: type[Any]) -> str:
    """Return the first sentence of a docstring."""
    return (documented.__doc__ or "").partition("\n\n")[0].replace("\n    ", " ")


def disk_tables() -> dict[str, str]:
    """Return the tables of the disk format."""
    return {
        "control-header": layout_table(files.CONTROL_HEADER_LAYOUT),
        "partition-info": layout_table(files.PARTITION_INFO_LAYOUT),
        "segment-header": layout_table(files.SEGMENT_HEADER_LAYOUT),
        "record": record_table(),
        "lineage-header": layout_table(files.LINEAGE_HEADER_LAYOUT),
        "lineage-entry": layout_table(files.LINEAGE_ENTRY_LAYOUT),
        "slot": layout_table(files.SLOT_LAYOUT, files.SLOT_TAIL_LAYOUT),
        "storage-id": layout_table(files.STORAGE_ID_LAYOUT),
        "wipe": layout_table(removal.WIPE_LAYOUT),
        "lock-block": layout_table(lock_blocks.TRAILER_LAYOUT),
    }


TYPE_BY_CODE = {"q": "int64", "i": "int32", "I": "uint32"}


def layout_table(*layouts: ByteLayout) -> str:
    """Return the fields of layouts that follow one another."""
    offsets = [
        field
        for number, layout in enumerate(layouts)
        for field in layout.field_offsets(sum(each.size_bytes for each in layouts[:number]))
    ]
    rows = [
        (
            field.offset,
            field.size_bytes,
            TYPE_BY_CODE.get(field.field.code, "bytes"),
            field.field.name,
            field.field.note,
        )
        for field in offsets
    ]
    return table(("offset", "bytes", "type", "field", ""), rows)


def record_table() -> str:
    """Return the fields of a record: the fields before its data, the data, and the CRC."""
    rows = list(dtype_rows(PREFIX_DTYPE, 0))
    end = PREFIX_DTYPE.itemsize
    rows.append((end, "length", "bytes", "data"))
    rows.append((f"{end} + length", 4, "uint32", "record_crc"))
    return table(("offset", "bytes", "type", "field"), rows)


def dtype_rows(dtype: "np.dtype[Any]", start: int) -> Iterable[tuple[object, ...]]:
    """Yield the fields of a NumPy structure; the fields of an inner structure replace it."""
    assert dtype.fields is not None
    for name, (field_dtype, offset, *_) in dtype.fields.items():
        if field_dtype.fields is not None:
            yield from dtype_rows(field_dtype, start + offset)
        else:
            yield start + offset, field_dtype.itemsize, field_dtype.name, name


def layer_diagrams() -> str:
    """Return the layers of the import contracts, each package with its first sentence."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    diagrams = [layer_diagram(contract) for contract in contracts if contract["type"] == "layers"]
    return "```\n" + "\n\n".join(diagrams) + "\n```"


def layer_diagram(contract: dict[str, list[str]]) -> str:
    """Return the lines of one contract; packages of one layer share its number."""
    (container,) = contract["containers"]
    names = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    width = max(len(name) for layer in names for name in layer)
    lines = [f"{container}"]
    for number, layer in zip(range(len(names), 0, -1), names, strict=True):
        for name in layer:
            layer_text = str(number) if name == layer[0] else ""
            lines.append(f"{layer_text:>4}  {name:{width}}  {summary(container, name)}".rstrip())
    return "\n".join(lines)


def summary(container: str, name: str) -> str:
    """Return the first line of a package's or module's docstring."""
    module_path = ROOT / container.replace(".", "/") / name
    path = module_path / "__init__.py" if module_path.is_dir() else module_path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def outdated_files() -> dict[str, str]:
    """Return the expected text of each generated file that is not up to date."""
    return {
        str(path.relative_to(ROOT)): text
        for path, text in sorted(generated_files().items())
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    """Write outdated files, or only name them with `--check`; return the exit code."""
    outdated = outdated_files()
    if "--check" in sys.argv[1:]:
        for name in outdated:
            print(f"{name}: not up to date, run make docs")
        return 1 if outdated else 0
    for name, text in outdated.items():
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
