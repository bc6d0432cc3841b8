"""The files of a manifest in a backup.

A backup contains these files, because a cluster deletes manifests that it has replaced. The head
must have the CRC-32 that ZooKeeper states, and each page the CRC-32 that the head states. The
objects must be consecutive.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

from waltz_core.archive.manifest import Manifest, ObjectEntry, check_crc, decode_page
from waltz_core.errors import BadFormat

if TYPE_CHECKING:
    from waltz_core.archive.store import ArchiveStore


class SavedManifest(NamedTuple):
    """A copy of all files of a manifest: head, pages, and the CRC-32 of the head."""

    name: str
    file_crc: int
    head: bytes
    pages: tuple[bytes, ...]

    @classmethod
    def read(cls, store: "ArchiveStore", name: str, file_crc: int) -> Self:
        """Read all files of a manifest from the store, and check them.

        Raises:
            ObjectMissing, ArchiveUnavailable: a file cannot be read.
            BadFormat, ChecksumMismatch: a file is wrong; the error names it.
        """
        head = store.read(name)
        pages = cls(name, file_crc, head, ()).manifest.pages
        saved = cls(
            name, file_crc, head, tuple(store.read(page_entry.name) for page_entry in pages)
        )
        saved.entries()
        return saved

    @property
    def manifest(self) -> Manifest:
        """The decoded head; raises BadFormat and ChecksumMismatch."""
        check_crc(self.name, self.head, self.file_crc)
        return Manifest.from_bytes(self.head, self.name)

    def entries(self) -> list[ObjectEntry]:
        """Return all objects in order; raises BadFormat and ChecksumMismatch."""
        manifest = self.manifest
        if len(self.pages) != len(manifest.pages):
            raise BadFormat(
                f"manifest {self.name}: expected {len(manifest.pages)} pages in the backup, "
                f"found {len(self.pages)}"
            )
        entries: list[ObjectEntry] = []
        for page_entry, data in zip(manifest.pages, self.pages, strict=True):
            entries += decode_page(page_entry, data).entries
        entries += manifest.newest_objects
        for previous, following in pairwise(entries):
            if following.first != previous.last + 1:
                raise BadFormat(
                    f"manifest {self.name}: expected the next object to begin at transaction "
                    f"{previous.last + 1}, found an object with transactions "
                    f"{following.first}..{following.last}"
                )
        return entries
