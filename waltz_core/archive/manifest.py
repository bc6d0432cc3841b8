"""The manifest of a partition's archive: its objects, in order and without gaps.

A manifest is a head and pages. A page lists `ENTRIES_PER_PAGE` objects, and never changes. The head
lists the pages and the newest objects. So even in a large archive, a new object requires only a new
head and, at times, one new page. Head and pages are separate files, and are never overwritten
(rule AR 2). Each file contains:

    8 hexadecimal digits   CRC-32 of the rest
    line feed
    JSON

Rules (docs/decisions/047):
    1. Objects are consecutive. Each object begins after the last usable ID of the preceding object,
       and continues from the chain hash at this ID.
    2. A new manifest lists all objects of the previous manifest, with two exceptions (AR 5). Expiry
       removes objects. A corrupt object is replaced by another object with the same IDs and chain
       hash.
    3. `version` rises by one with every manifest of a partition.
    4. Expiry raises `first`. For `EXPIRY_GRACE_MS`, the manifest still lists the objects below
       `first`, and the store keeps them, because a reader may use an older manifest. `expiries`
       contains the times of expiry.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from waltz_core.archive.file_names import writer_cluster_key
from waltz_core.errors import BadFormat, ChecksumMismatch
from waltz_core.records import strict_json
from waltz_core.records.checksum import crc32
from waltz_core.records.record import Chain, PartitionId, TransactionId
from waltz_core.values import value

if TYPE_CHECKING:
    from waltz_core.archive.store import ArchiveStore

# The format of manifests, of their pages, and of backups (`cluster/change/backup.py`).
FORMAT_VERSION: Final = 1
ENTRIES_PER_PAGE: Final = 1_000
EXPIRY_GRACE_MS: Final = 24 * 3_600_000
_CHAIN_BYTES: Final = 16


class ObjectEntry(NamedTuple):
    """One object: its file name, its IDs, and the values that identify its content.

    `last` is the last usable ID; the object may contain higher IDs. `chain` is the chain hash at
    `last`. Commit times are in ms, 0 if no transaction has a commit time.
    """

    name: str
    first: TransactionId
    last: TransactionId
    chain: Chain
    file_bytes: int
    file_crc: int
    record_bytes: int
    commit_ms_min: int
    commit_ms_max: int


class PageEntry(NamedTuple):
    """One page: its file, its CRC-32, and the bounds of its objects."""

    name: str
    file_crc: int
    first: TransactionId
    last: TransactionId
    commit_ms_min: int
    commit_ms_max: int


class Expiry(NamedTuple):
    """One expiry: at `at_ms` of a storage's clock, `first` became the first available ID."""

    first: TransactionId
    at_ms: int


class ManifestPage(NamedTuple):
    """A page of a manifest: a list of objects in order."""

    entries: tuple[ObjectEntry, ...]

    def to_bytes(self) -> bytes:
        """Return the content of the page's file."""
        return encode_with_crc(
            {"format": FORMAT_VERSION, "objects": [_entry_to_json(entry) for entry in self.entries]}
        )

    def to_entry(self, name: str) -> PageEntry:
        """Return the entry of this page for the head of a manifest; `name` is the page's file."""
        entries = self.entries
        times = [time_ms for entry in entries for time_ms in _commit_times(entry)]
        return PageEntry(
            name,
            crc32(self.to_bytes()),
            entries[0].first,
            entries[-1].last,
            min(times, default=0),
            max(times, default=0),
        )

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Decode a page and check it.

        Raises:
            BadFormat, ChecksumMismatch: the file is wrong; the error names it.
        """
        values = decode_with_crc(data, f"manifest {name}")
        listed = _list_of(values, "objects", name)
        return cls(tuple(_entry_from_json(entry_values, name) for entry_values in listed))


@value(frozen=True, slots=True)
class Manifest:
    """The head of a manifest. `first` is the first available ID, `last` the archived mark."""

    cluster_key: bytes
    partition_id: PartitionId
    version: int
    first: TransactionId
    last: TransactionId
    chain: Chain
    pages: tuple[PageEntry, ...] = ()
    newest_objects: tuple[ObjectEntry, ...] = ()
    expiries: tuple[Expiry, ...] = ()

    def with_object(self, entry: ObjectEntry) -> "Manifest":
        """Return the next manifest, with one more object; raises BadFormat if there is a gap."""
        if entry.first != self.last + 1 or entry.last < entry.first:
            raise BadFormat(
                f"cannot add an object to manifest {self.version} of partition "
                f"{self.partition_id}: expected its first transaction ID to be "
                f"{self.last + 1}, found an object with the IDs {entry.first}..{entry.last}"
            )
        return replace(
            self,
            version=self.version + 1,
            last=entry.last,
            chain=entry.chain,
            newest_objects=(*self.newest_objects, entry),
        )

    @property
    def page_to_write(self) -> ManifestPage | None:
        """The page that must be written before another object is added; None if there is none."""
        is_full = len(self.newest_objects) >= 2 * ENTRIES_PER_PAGE
        return ManifestPage(self.newest_objects[:ENTRIES_PER_PAGE]) if is_full else None

    def with_page(self, name: str, page: ManifestPage) -> "Manifest":
        """Return this manifest with a written page in place of the oldest objects in the head."""
        count = len(page.entries)
        assert self.newest_objects[:count] == page.entries
        pages = (*self.pages, page.to_entry(name))
        return replace(self, pages=pages, newest_objects=self.newest_objects[count:])

    def page_containing(self, transaction_id: TransactionId) -> PageEntry | None:
        """Return the page that lists the object with an ID; None if the head lists this object."""
        return next(
            (
                page_entry
                for page_entry in self.pages
                if page_entry.first <= transaction_id <= page_entry.last
            ),
            None,
        )

    def with_newest_objects(self, newest_objects: tuple[ObjectEntry, ...]) -> "Manifest":
        """Return the next manifest, in which the head lists these objects."""
        return replace(self, version=self.version + 1, newest_objects=newest_objects)

    def with_replaced_page(self, old: PageEntry, name: str, page: ManifestPage) -> "Manifest":
        """Return the next manifest, in which a written page replaces the page `old`."""
        new_entry = page.to_entry(name)
        assert (new_entry.first, new_entry.last) == (old.first, old.last)
        pages = tuple(new_entry if page_entry == old else page_entry for page_entry in self.pages)
        return replace(self, version=self.version + 1, pages=pages)

    def writer_cluster_key(self, entry: ObjectEntry) -> bytes:
        """Return the key of the cluster that wrote an object."""
        return writer_cluster_key(entry.name) or self.cluster_key

    def deletable_below(self, now_ms: int) -> TransactionId:
        """Return the ID below which all objects have expired and are past their grace period.

        No object at or above this ID may be deleted, whether it has expired or not (rule 4).
        """
        starts = [
            expiry.first for expiry in self.expiries if expiry.at_ms + EXPIRY_GRACE_MS <= now_ms
        ]
        return max(starts, default=TransactionId(0))

    def with_expiry(self, first: TransactionId, now_ms: int) -> "Manifest":
        """Return the next manifest, in which `first` is the first available ID (rule 4).

        The new manifest omits the objects that may be deleted. But if a page also lists another
        object, the new manifest keeps the complete page.
        """
        assert self.first <= first <= self.last + 1
        end = self.deletable_below(now_ms)
        expiries = [listed for listed in self.expiries if listed.first >= end]
        if first > self.first:
            expiries.append(Expiry(first, now_ms))
        return replace(
            self,
            version=self.version + 1,
            first=first,
            pages=tuple(listed for listed in self.pages if listed.last >= end),
            newest_objects=tuple(listed for listed in self.newest_objects if listed.last >= end),
            expiries=tuple(expiries),
        )

    def to_bytes(self) -> bytes:
        """Return the content of the head's file."""
        values: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "cluster_key": self.cluster_key.hex(),
            "partition": self.partition_id,
            "version": self.version,
            "first": self.first,
            "last": self.last,
            "chain": self.chain.hex(),
            "pages": [listed._asdict() for listed in self.pages],
            "objects": [_entry_to_json(listed) for listed in self.newest_objects],
        }
        if self.expiries:
            values["expiries"] = [listed._asdict() for listed in self.expiries]
        return encode_with_crc(values)

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Self:
        """Decode a head and check it (rule 1).

        Raises:
            BadFormat, ChecksumMismatch: the file is wrong; the error names it.
        """
        values = decode_with_crc(data, f"manifest {name}")
        try:
            manifest = cls(
                _parse_hex(values["cluster_key"]),
                PartitionId(_parse_whole_number(values["partition"])),
                _parse_whole_number(values["version"]),
                TransactionId(_parse_whole_number(values["first"])),
                TransactionId(_parse_whole_number(values["last"])),
                Chain(_parse_hex(values["chain"])),
                tuple(_page_from_json(listed, name) for listed in _list_of(values, "pages", name)),
                tuple(
                    _entry_from_json(listed, name) for listed in _list_of(values, "objects", name)
                ),
                _expiries_in(values, name),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadFormat(
                f"manifest {name} cannot be decoded: {type(error).__name__}: {error}"
            ) from error
        manifest._check_consistency(name)
        return manifest

    def _check_consistency(self, name: str) -> None:
        bounds = [listed[2:4] for listed in self.pages] + [
            listed[1:3] for listed in self.newest_objects
        ]
        listed_last = bounds[0][0] - 1 if bounds else self.last
        for first, last in bounds:
            if first != listed_last + 1 or last < first:
                raise BadFormat(
                    f"manifest {name}: expected the next page or object to begin at transaction "
                    f"{listed_last + 1}, found one with transactions {first}..{last}"
                )
            listed_last = last
        if listed_last != self.last:
            raise BadFormat(
                f"manifest {name}: expected objects up to transaction {self.last}, found objects "
                f"up to transaction {listed_last}"
            )
        if not 0 <= self.first <= self.last + 1:
            raise BadFormat(
                f"manifest {name}: expected a first available ID in 0..{self.last + 1}, found "
                f"{self.first}"
            )
        if bounds and self.first < bounds[0][0]:
            raise BadFormat(
                f"manifest {name}: expected objects from the first available ID {self.first} on, "
                f"found objects from transaction {bounds[0][0]} on"
            )


class RecordedManifest(NamedTuple):
    """The name, checksum and content of a manifest, as ZooKeeper records them."""

    partition_id: PartitionId
    last: TransactionId
    chain: Chain
    name: str
    file_crc: int

    def read(self, store: "ArchiveStore", cluster_key: bytes) -> Manifest:
        """Read the head of this manifest (blocking).

        Raises:
            ObjectMissing, ArchiveUnavailable: the head cannot be read.
            BadFormat, ChecksumMismatch: the file is not the recorded one.
        """
        data = store.read(self.name)
        check_crc(self.name, data, self.file_crc)
        manifest = Manifest.from_bytes(data, self.name)
        self.check_matches(manifest, cluster_key)
        return manifest

    def check_matches(self, manifest: Manifest, cluster_key: bytes) -> None:
        """Raise BadFormat unless a manifest has the recorded partition, last ID and chain hash."""
        found_state = (manifest.cluster_key, manifest.partition_id, manifest.last, manifest.chain)
        if found_state != (cluster_key, self.partition_id, self.last, self.chain):
            raise BadFormat(
                f"manifest {self.name or '(none)'} is not the one that ZooKeeper records: "
                f"expected partition {self.partition_id} of cluster {cluster_key.hex()} up to "
                f"transaction {self.last} with chain hash {self.chain.hex()}, found partition "
                f"{manifest.partition_id} of cluster {manifest.cluster_key.hex()} up to "
                f"transaction {manifest.last} with chain hash {manifest.chain.hex()}"
            )


def decode_page(page_entry: PageEntry, data: bytes) -> ManifestPage:
    """Decode a page that a head lists.

    Raises ChecksumMismatch or BadFormat if the file does not match its entry in the head.
    """
    check_crc(page_entry.name, data, page_entry.file_crc)
    page = ManifestPage.from_bytes(data, page_entry.name)
    entries = page.entries
    found_ids = f"{entries[0].first}..{entries[-1].last}" if entries else "no entries"
    expected_ids = f"{page_entry.first}..{page_entry.last}"
    if found_ids != expected_ids:
        raise BadFormat(
            f"manifest page {page_entry.name}: expected the transaction IDs {expected_ids}, found "
            f"{found_ids}"
        )
    return page


def check_crc(name: str, data: bytes, expected: int) -> None:
    """Raise ChecksumMismatch unless the bytes of a head or a page have this CRC-32."""
    if crc32(data) != expected:
        raise ChecksumMismatch(
            f"manifest {name} is corrupt: expected CRC {expected:08x}, found {crc32(data):08x}"
        )


def _commit_times(entry: ObjectEntry) -> tuple[int, ...]:
    return (entry.commit_ms_min, entry.commit_ms_max) if entry.commit_ms_max else ()


def encode_with_crc(values: dict[str, Any]) -> bytes:
    """Encode a JSON object, after a line with the CRC-32 of its bytes."""
    body = strict_json.to_json(values)
    return b"%08x\n%s" % (crc32(body), body)


def decode_with_crc(data: bytes, what: str) -> dict[str, Any]:
    """Decode the bytes of `encode_with_crc`; `what` names them in errors.

    Raises:
        BadFormat, ChecksumMismatch: the bytes are damaged or have another format.
    """
    crc_line, _, body = data.partition(b"\n")
    if crc_line != b"%08x" % crc32(body):
        raise ChecksumMismatch(
            f"{what} is corrupt: expected CRC {crc32(body):08x}, found {crc_line[:20]!r}"
        )
    try:
        values = strict_json.from_json(body)
    except ValueError as error:
        raise BadFormat(f"{what}: {error}") from error
    found_format = values.get("format") if isinstance(values, dict) else None
    if not isinstance(values, dict) or found_format != FORMAT_VERSION:
        raise BadFormat(f"{what}: expected file format {FORMAT_VERSION}, found {found_format!r}")
    return values


def _list_of(values: dict[str, Any], key: str, name: str) -> list[Any]:
    found = values.get(key)
    if not isinstance(found, list):
        raise BadFormat(
            f"manifest {name}: expected a JSON list in field {key}, found {found!r:.80}"
        )
    return found


def _expiries_in(values: dict[str, Any], name: str) -> tuple[Expiry, ...]:
    if "expiries" not in values:
        return ()
    listed = _list_of(values, "expiries", name)
    return tuple(Expiry(*_fields_of(expiry_values, Expiry, name)) for expiry_values in listed)


def _entry_to_json(entry: ObjectEntry) -> dict[str, Any]:
    return {**entry._asdict(), "chain": entry.chain.hex()}


def _entry_from_json(values: object, name: str) -> ObjectEntry:
    return ObjectEntry(*_fields_of(values, ObjectEntry, name))


def _page_from_json(values: object, name: str) -> PageEntry:
    return PageEntry(*_fields_of(values, PageEntry, name))


_FIELD_OF_KIND: Final = {ObjectEntry: "objects", PageEntry: "pages", Expiry: "expiries"}


def _fields_of(
    values: object, kind: type[ObjectEntry] | type[PageEntry] | type[Expiry], name: str
) -> tuple[Any, ...]:
    if not isinstance(values, dict) or set(values) != set(kind._fields):
        raise BadFormat(
            f"manifest {name}: expected an entry of field {_FIELD_OF_KIND[kind]} with the keys "
            f"{', '.join(kind._fields)}, found {values!r:.200}"
        )
    parsed_values: list[Any] = []
    for field in kind._fields:
        value = values[field]
        try:
            if field == "name":
                parsed_values.append(_parse_text(value))
            elif field == "chain":
                parsed_values.append(Chain(_parse_hex(value)))
            else:
                parsed_values.append(_parse_whole_number(value))
        except (TypeError, ValueError) as error:
            raise BadFormat(
                f"manifest {name}, key {field} of an entry of field {_FIELD_OF_KIND[kind]}: {error}"
            ) from error
    return tuple(parsed_values)


def _parse_hex(text: object) -> bytes:
    parsed = bytes.fromhex(_parse_text(text))
    if len(parsed) != _CHAIN_BYTES:
        raise ValueError(
            f"expected a chain hash of {_CHAIN_BYTES} bytes, found {len(parsed)} bytes"
        )
    return parsed


def _parse_text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"expected a text, found {value!r:.80}")
    return value


def _parse_whole_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise TypeError(f"expected a number of at least -1, found {value!r:.80}")
    return value
