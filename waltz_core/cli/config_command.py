"""`waltz-core config show KIND`: every setting in force and where it came from."""

import argparse
import os
from pathlib import Path

from waltz_core.cli.output import show_json, show_table
from waltz_core.config.declarations import KINDS
from waltz_core.config.settings import load


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    shown = verbs.add_parser("show", help="show settings: defaults, file, environment")
    shown.add_argument("kind", choices=sorted(KINDS), help="whose settings")
    shown.add_argument("--config", type=Path, help="a TOML file")
    shown.add_argument("--json", action="store_true", help="one JSON value on standard output")
    shown.set_defaults(verb=_show)


def _show(arguments: argparse.Namespace) -> int:
    kind = KINDS[arguments.kind]
    loaded = load(kind, path=arguments.config, environment=os.environ)
    rows = [(each.name, each.value, each.origin) for each in loaded.shown()]
    if arguments.json:
        titles = ("name", "value", "origin")
        show_json([dict(zip(titles, row, strict=True)) for row in rows])
    else:
        show_table(("setting", "value", "from"), rows)
    return 0
