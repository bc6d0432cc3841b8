"""`waltz-core storage`: run a storage daemon, and administer storages while they run."""

import argparse

from waltz_core.cli import http_pages
from waltz_core.cli.storage import (
    storage_partitions,
    storage_run,
    storage_scrub,
    storage_views,
)

# verb -> (what declares it, one line of help)
VERBS = {
    "list": (storage_views.add_list, "show which partitions storages hold, and how they stand"),
    "validate": (storage_views.add_validate, "reach every storage of a cluster at both ports"),
    "metrics": (http_pages.add_metrics, "show the numbers of one storage"),
    "max-transaction-id": (storage_views.add_max_id, "show the last id that is on disk"),
    "add-partition": (storage_partitions.add_add, "hold partitions"),
    "remove-partition": (storage_partitions.add_remove, "hold partitions no longer"),
    "availability": (storage_partitions.add_availability, "take partitions offline, or online"),
    "sync-partitions": (
        storage_partitions.add_sync,
        "make storages hold what ZooKeeper assigns to them",
    ),
    "recover-partition": (
        storage_partitions.add_recover,
        "copy what is settled from another storage to a partition that is offline",
    ),
    "scrub": (storage_scrub.add_scrub, "read records again, now, and tell how far that is"),
    "mark-suspect": (
        storage_partitions.add_mark_suspect,
        "believe replicas no longer, as after a restore from a backup",
    ),
    "re-seed": (
        storage_partitions.add_re_seed,
        "throw replicas' logs away and have them copied from the others",
    ),
}


def add(command: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = command.add_subparsers(title="verbs", metavar="VERB", required=True)
    storage_run.add(verbs)
    for name, (declare, text) in VERBS.items():
        declare(verbs.add_parser(name, help=text, description=text))
