"""The file of a backup, in a directory or an object store; all calls block."""

from pathlib import Path
from typing import Final, NamedTuple, Self

from waltz_core.archive.store import ArchiveStore
from waltz_core.cluster.change.backup import Backup
from waltz_core.errors import BadConfig, ObjectMissing

# A backup contains the key that signs client IDs, and the hashes of tokens.
_FILE_MODE: Final = 0o600


class BackupLocation(NamedTuple):
    """The location of a backup file: an object store or directory, and the file's name there."""

    text: str
    store: ArchiveStore
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the path or the URL of a file; raises BadConfig."""
        url = text if "://" in text else Path(text).absolute().as_uri()
        path, question, options = url.partition("?")
        folder, _, name = path.rpartition("/")
        if not name:
            raise BadConfig(
                f"expected the path of a file, or a URL that ends with a file name, found {text!r}"
            )
        return cls(text, ArchiveStore(folder + question + options, file_mode=_FILE_MODE), name)

    def check_absent(self) -> None:
        """Raise BadConfig if the file exists."""
        try:
            self.store.open(self.name).close()
        except ObjectMissing:
            return
        raise BadConfig(
            "the file for the backup exists already, and the command does not overwrite it: "
            f"{self.text}"
        )

    def write(self, backup: Backup) -> int:
        """Write the backup, and return its size in bytes; the file is durable after the call.

        Raises:
            ArchiveUnavailable: the backup was not written.
        """
        data = backup.to_bytes()
        self.store.write(self.name, data)
        return len(data)

    def read(self) -> Backup:
        """Read and check the backup.

        Raises:
            ObjectMissing, ArchiveUnavailable: the file cannot be read.
            BadFormat, ChecksumMismatch: the file is not a valid backup.
        """
        return Backup.from_bytes(self.store.read(self.name), self.text)
