"""`waltz-core config show KIND`: every effective setting and its source."""

import os
from pathlib import Path

from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_json, print_table
from waltz_core.cli.subcommands import subcommand
from waltz_core.config.declarations import CONFIG_TYPES_BY_KIND
from waltz_core.config.settings import load_config


@subcommand
@options.argument(
    "kind",
    "KIND",
    "the kind of process: client, gateway, local, server, storage, or tls for a TLS file",
    type=options.SuggestingChoice(sorted(CONFIG_TYPES_BY_KIND)),
)
@options.config_option
@options.json_option
def show_command(*, kind: str, config: Path | None, as_json: bool) -> int:
    """Show each setting of a kind of process, and the origin of its value."""
    config_with_origins = load_config(
        CONFIG_TYPES_BY_KIND[kind], path=config, environment=os.environ
    )
    rows = [
        (shown_setting.name, shown_setting.value, shown_setting.origin)
        for shown_setting in config_with_origins.effective_settings()
    ]
    if as_json:
        titles = ("name", "value", "origin")
        print_json([dict(zip(titles, row, strict=True)) for row in rows])
    else:
        print_table(("setting", "value", "from"), rows)
    return 0


show_command.help_details = (
    "Only this command reads settings of `client` from a file and from variables "
    "WALTZ_CLIENT_*. An application passes a `ClientConfig` to its client instead."
)
