"""`waltz-core disk`: a storage's files, looked at and verified while no storage runs.

Rules:
    1. Nothing here writes but `repair-index`.
    2. `verify` and `repair-index` need the directory to themselves, and say so when a storage runs
       on it. The others only look, and may see a log that is being written.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from waltz_core.cli.disk import (
    disk_control,
    disk_segment,
    disk_verify,
)

FINDINGS_LIMIT = 1000


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    dump = _verb(
        verbs,
        "dump-control-file",
        disk_control.dump,
        "show what stands in the control files, broken or not",
        "a storage directory, a partition's, waltz-storage.ctl or waltz-x.ctl",
    )
    dump.add_argument(
        "-a", "--assigned", action="store_true", help="only partitions that are held here"
    )
    _add_dump_segment(verbs)
    _verb(
        verbs,
        "segment-statistic",
        disk_segment.statistic,
        "count sizes, ids, batches and sessions of segments",
        "a .seg file, a partition's directory or a storage directory",
    )
    verify = _verb(
        verbs,
        "verify",
        disk_verify.verify,
        "compute every checksum and every chain anew; exit code 1 if anything is wrong",
        "a storage directory, a partition's, or a .seg file",
    )
    verify.add_argument(
        "--limit",
        type=int,
        default=FINDINGS_LIMIT,
        metavar="N",
        help=f"show at most N findings (default {FINDINGS_LIMIT}); the others are counted",
    )
    repair = _verb(
        verbs,
        "repair-index",
        disk_verify.repair_index,
        "make .idx files anew from their .seg files, where they are not right",
        "a .seg file, a partition's directory or a storage directory",
    )
    repair.add_argument("--dry-run", action="store_true", help="only say what would be done")


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    path: str,
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.add_argument("path", type=Path, metavar="PATH", help=path)
    verb.add_argument(
        "-p",
        "--partition",
        type=int,
        action="append",
        metavar="P",
        help="only this one of a storage directory; give it once for each",
    )
    verb.add_argument("--json", action="store_true", help="one JSON value on standard output")
    verb.set_defaults(verb=run)
    return verb


def _add_dump_segment(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    dump = _verb(
        verbs,
        "dump-segment",
        disk_segment.dump,
        "print the records of segments, one a line",
        "a .seg file, a partition's directory or a storage directory",
    )
    dump.add_argument("-m", "--metadata", action="store_true", help="print the segment's header")
    dump.add_argument(
        "-r",
        "--record",
        action="store_true",
        help="print records; without -m, -r and --batches: all",
    )
    dump.add_argument("--batches", action="store_true", help="print the batches of .chn too")
    dump.add_argument("-t", "--transaction", type=int, metavar="ID", help="print this record only")
    dump.add_argument("--first", type=int, metavar="ID", help="from this id on")
    dump.add_argument("--last", type=int, metavar="ID", help="up to this id")
    dump.add_argument("--data", action="store_true", help="print the data of records, too")
    dump.add_argument(
        "-d",
        "--deserializer",
        metavar="NAME",
        help="how data is read: bytes (default), msgpack, json, or module:name for a function of "
        "bytes or a serializer of yours; implies --data",
    )
