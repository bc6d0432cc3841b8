"""The names of the files in an archive.

Below the URL of the store, the files of a partition have these names:

    CLUSTER/P/objects/FIRST-LAST-SESSION-NONCE-N.parquet     an object
    CLUSTER/P/manifests/VERSION-SESSION-NONCE-N.json         the head of a manifest
    CLUSTER/P/manifests/VERSION-SESSION-NONCE-N-page.json    a page of a manifest

CLUSTER is the cluster key, P is the partition, and N is the number of the owner's attempt. So each
name occurs once (docs/decisions/047, AR 2), and shows which owner has requested the file.

If the store is a directory, a file has the suffix `.tmp` until it is complete.
"""

import re
from typing import Final, NamedTuple
from uuid import UUID

from waltz_core.records.record import PartitionId, SessionId, TransactionId

TEMPORARY_SUFFIX: Final = ".tmp"
_NUMBER: Final = r"(?:0|[1-9][0-9]*)"
_ORIGIN: Final = rf"(?P<session>{_NUMBER})-(?P<nonce>[0-9a-f]{{32}})-(?P<attempt>{_NUMBER})"
_MANIFEST_HEAD_PATTERN: Final = re.compile(rf"{_NUMBER}-{_ORIGIN}\.json", re.ASCII)
_NAME_PATTERNS: Final = {
    "objects": re.compile(rf"{_NUMBER}-{_NUMBER}-{_ORIGIN}\.parquet(?:\.tmp)?", re.ASCII),
    "manifests": re.compile(rf"{_NUMBER}-{_ORIGIN}(?:-page)?\.json(?:\.tmp)?", re.ASCII),
}


class FileOrigin(NamedTuple):
    """The attempt that wrote a file: store session and nonce of the owner, and a number."""

    session_id: SessionId
    nonce: bytes
    attempt: int

    def __str__(self) -> str:
        return f"{self.session_id}-{self.nonce.hex()}-{self.attempt}"


def objects_folder(cluster_key: bytes, partition_id: PartitionId) -> str:
    """Return the folder of a partition's objects."""
    return f"{UUID(bytes=cluster_key)}/{partition_id}/objects"


def manifests_folder(cluster_key: bytes, partition_id: PartitionId) -> str:
    """Return the folder of a partition's manifests and their pages."""
    return f"{UUID(bytes=cluster_key)}/{partition_id}/manifests"


def object_name(folder: str, first: TransactionId, last: TransactionId, origin: FileOrigin) -> str:
    """Return the name of an object with the IDs first..last."""
    return f"{folder}/{first}-{last}-{origin}.parquet"


def manifest_name(folder: str, version: int, origin: FileOrigin) -> str:
    """Return the name of the head of a manifest."""
    return f"{folder}/{version}-{origin}.json"


def page_name(folder: str, version: int, origin: FileOrigin) -> str:
    """Return the name of the page that a manifest with this version adds."""
    return f"{folder}/{version}-{origin}-page.json"


def manifest_version_of(name: str) -> int | None:
    """Return the version in the file name of a manifest's head; None for any other name."""
    folder, _, last_part = name.rpartition("/")
    is_head = (
        folder.endswith("/manifests") and _MANIFEST_HEAD_PATTERN.fullmatch(last_part) is not None
    )
    return int(last_part.partition("-")[0]) if is_head else None


def origin_of(name: str) -> FileOrigin | None:
    """Return the attempt in the name of a file, complete or not; None for any other name."""
    folder, _, last_part = name.rpartition("/")
    pattern = _NAME_PATTERNS.get(folder.rpartition("/")[2])
    match = None if pattern is None else pattern.fullmatch(last_part)
    if match is None:
        return None
    session, nonce, attempt = match["session"], match["nonce"], match["attempt"]
    return FileOrigin(SessionId(int(session)), bytes.fromhex(nonce), int(attempt))


def writer_cluster_key(name: str) -> bytes | None:
    """Return the key of the cluster that wrote a file; None if its name has no key.

    A restored cluster lists objects of its source cluster, which are stored below the key of the
    source.
    """
    try:
        return UUID(name.partition("/")[0]).bytes
    except ValueError:
        return None
