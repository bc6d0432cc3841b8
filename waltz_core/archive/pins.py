"""Pins: while a restored cluster uses objects of another one, that one deletes no object.

A pin is an empty file `SOURCE/pins/CLUSTER`, with the keys of both clusters. It remains until an
operator deletes it: the source's processes do not know whether the restored cluster still exists.
"""

from typing import TYPE_CHECKING
from uuid import UUID

if TYPE_CHECKING:
    from waltz_core.archive.store import ArchiveStore


def pin(store: "ArchiveStore", source_key: bytes, cluster_key: bytes) -> str | None:
    """Pin the objects of a cluster for a restored one; blocks.

    Return the name of the pin, or None if it existed.

    Raises:
        ArchiveUnavailable: it was not written.
    """
    name = f"{_folder(source_key)}/{UUID(bytes=cluster_key)}"
    if name in store.names(_folder(source_key)):
        return None
    store.write(name, b"")
    return name


def is_pinned(store: "ArchiveStore", cluster_key: bytes) -> bool:
    """Whether a restored cluster may use objects of this one; blocks.

    Raises:
        ArchiveUnavailable: the store did not carry out the request.
    """
    return bool(store.names(_folder(cluster_key)))


def _folder(cluster_key: bytes) -> str:
    return f"{UUID(bytes=cluster_key)}/pins"
