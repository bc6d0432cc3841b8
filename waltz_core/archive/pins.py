"""Pins: files that prevent the deletion of objects that a restored cluster uses.

A pin is an empty file `SOURCE/pins/CLUSTER`. SOURCE is the key of the cluster that has written the
objects, and CLUSTER is the key of the restored cluster. The pin remains until an operator deletes
it, because the processes of the source cluster cannot detect whether the restored cluster still
exists.

Rules (docs/decisions/055):
    1. A restore writes the pin, and checks afterwards that all objects exist. It repeats this check
       when it has written its manifests.
    2. A garbage collection reads the pins again before it deletes an object. So the restore misses
       a deletion in one case only: the collection has sent the deletion before the pin was written,
       and the store executes the deletion after the last check.
    3. If the store is a directory, a killed restore may leave the temporary file of its pin. This
       file has the effect of a pin, and is listed and deleted like a pin.
"""

from typing import TYPE_CHECKING
from uuid import UUID

from waltz_core.archive.file_names import TEMPORARY_SUFFIX
from waltz_core.errors import BadRequest

if TYPE_CHECKING:
    from waltz_core.archive.store import ArchiveStore


def pin_objects(store: "ArchiveStore", source_key: bytes, cluster_key: bytes) -> str | None:
    """Pin the objects of a cluster for a restored cluster (blocking).

    Return the name of the pin, or None if it existed already.

    Raises:
        ArchiveUnavailable: the pin was not written.
    """
    name = f"{_folder(source_key)}/{UUID(bytes=cluster_key)}"
    if name in store.list_names(_folder(source_key)):
        return None
    store.write(name, b"")
    return name


def is_pinned(store: "ArchiveStore", cluster_key: bytes) -> bool:
    """Whether the objects of this cluster are pinned for a restored cluster (blocking).

    Raises:
        ArchiveUnavailable: the store did not execute the request.
    """
    return bool(store.list_names(_folder(cluster_key)))


def pins_of(store: "ArchiveStore", cluster_key: bytes) -> list[str]:
    """Return the keys of the clusters that pin objects of this cluster (blocking).

    Raises:
        ArchiveUnavailable: the store did not execute the request.
    """
    names = [name.rpartition("/")[2] for name in store.list_names(_folder(cluster_key))]
    return sorted({name.removesuffix(TEMPORARY_SUFFIX) for name in names})  # rule 3


def unpin_objects(store: "ArchiveStore", source_key: bytes, cluster_key: bytes) -> None:
    """Delete a pin (blocking).

    Raises:
        BadRequest: the pin does not exist.
        ArchiveUnavailable: the store did not execute a request.
    """
    pin, pins = str(UUID(bytes=cluster_key)), pins_of(store, source_key)
    if pin not in pins:
        raise BadRequest(
            f"archive {store.url}: expected a pin of the cluster with key {pin}, found "
            f"{', '.join(pins) or 'none'}"
        )
    for suffix in (TEMPORARY_SUFFIX, ""):  # rule 3
        store.delete(f"{_folder(source_key)}/{pin}{suffix}")


def _folder(cluster_key: bytes) -> str:
    return f"{UUID(bytes=cluster_key)}/pins"
