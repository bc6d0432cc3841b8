"""The audit log of a daemon: JSON lines about administrative and denied requests.

The file also contains a line for each revision of the permissions (decision 048, AC 11).

Rules:
    1. An administrative request begins only after its line was written to the file. If the file
       cannot be written, or `QUEUE_LINES_MAX` lines wait, the request is rejected.
    2. An administrative request has a second line, with its outcome and the same number as the
       first line.
    3. A flood of denials must not use the space of administrative requests:
        - Denials of one minute with the same principal, host, message, verbs and partitions share
          one line. A second line at the end of the minute states how often the denial was repeated.
        - In each minute, the log records at most `DENIALS_PER_PEER_MAX` different denials of one
          principal, at most as many of one host, and at most `DENIALS_MAX` in total.
        - When the file has `DENIALS_FILE_BYTES_MAX`, the log records no more denials.
        - The next recorded denial states how many denials were omitted.
    4. A thread writes the lines in order. While the file cannot be written, outcomes and revisions
       wait until the next line is written, and denials are dropped.
    5. A value must not be able to begin a line or to hide one, so all characters of a line are
       printable ASCII. If the disk is full in the middle of a line, the next line still begins on a
       new line.
    6. Lines are not synced: they survive if the process exits, but may not survive a crash of the
       machine.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from datetime import UTC, datetime
from enum import Enum
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Final, NamedTuple, TypeAlias

from waltz_core.access.permission_changes import format_ranges, ranges_of
from waltz_core.access.permissions import Permissions
from waltz_core.access.requirements import ADMINISTER, Requirement, Scope
from waltz_core.errors import BadConfig, Overloaded, Unavailable, WaltzError
from waltz_core.transport.admission.port_limits import network_of
from waltz_core.wire.messages import Message

_log = logging.getLogger(__name__)

QUEUE_LINES_MAX: Final = 10_000
DENIALS_PER_PEER_MAX: Final = 60
DENIALS_MAX: Final = 300
DENIALS_FILE_BYTES_MAX: Final = 1 << 30
_MINUTE_S: Final = 60
CLOSE_S_MAX: Final = 2.0
_BATCH_LINES_MAX: Final = 1_000
_TEXT_CHARACTERS_MAX: Final = 1_000
_PARTITIONS_MAX: Final = 20_000  # the maximum number of partitions that a line names
_COMPARED_PARTITIONS_MAX: Final = (
    16  # partitions by which denials are compared, in addition to their number
)
_FILE_MODE: Final = 0o640
# Fields of messages that "object" already contains, or that a reader of the log does not need.
_OMITTED_FIELDS: Final = {"req_id", "session_id", "sequence", "partition_id", "partitions"}

WrittenCallback: TypeAlias = Callable[[WaltzError | None], None]


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Peer(NamedTuple):
    """The sender of a request: its principal, and its address "host:port"."""

    principal: str
    address: str


class _Line(NamedTuple):
    """One line of the file; if it is not written, `on_written` is called with the error.

    `is_kept`: the line waits while the file cannot be written (rule 4), and is not dropped.
    """

    data: bytes
    is_kept: bool = False
    on_written: WrittenCallback | None = None


class _Command(NamedTuple):
    """An entry of the queue that is not a line: a command to open the file again, or to stop."""

    is_end: bool


class AuditFile:
    """The audit log of a daemon. Create and call it on the thread of the event loop."""

    def __init__(self, path: str, clock_ms: Callable[[], int] = _wall_clock_ms) -> None:
        """Open the file and start the thread; raises BadConfig if the file cannot be opened."""
        try:
            self._file = _OpenAuditFile(path)
        except OSError as error:
            raise BadConfig(
                f"setting audit_log: {path!r} cannot be opened ({error.strerror})"
            ) from error
        self._clock_ms = clock_ms
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._denials = _Denials()
        self._minute_end: asyncio.TimerHandle | None = None
        self._is_full = False
        self._queue: SimpleQueue[_Line | _Command] = SimpleQueue()
        # Used by the thread only: the lines that wait, and the number of lost lines.
        self._kept_lines: list[_Line] = []
        self._lost_count = 0
        self._has_failed = False
        self._thread = Thread(target=self._serve, name="audit-log", daemon=True)
        self._thread.start()

    # ---- on the loop's thread

    def request(self, peer: Peer, requirement: Requirement, message: Message) -> "AuditedRequest":
        """Return the entry of an administrative request; the caller must call its `begin` next."""
        fields = {"request": next(self._numbers), **_fields_of(peer, requirement, message)}
        return AuditedRequest(self, fields)

    def deny(
        self,
        peer: Peer,
        requirement: Requirement | str,
        message: Message,
        *,
        error: str,
        is_enforced: bool,
    ) -> None:
        """Write a denial, or only count it (rule 3).

        If `requirement` is a text, the text names a token that was not accepted.
        """
        minute = self._clock_ms() // 1000 // _MINUTE_S
        if minute != self._denials.minute:
            self._end_minute()
            self._denials.minute = minute
        kind = _DenialKind.from_request(peer, requirement, message)
        if not self._denials.should_write(kind, has_room=self._has_room()):
            return
        fields = _fields_of(peer, requirement, message)
        fields["outcome"] = "denied" if is_enforced else "would_be_denied"
        self._denials.recorded[kind] = _RecordedDenial(fields)
        omitted = self._denials.take_omitted()
        more = {"omitted": omitted} if omitted else {}
        self._put(_Line(self._encode({**fields, **more}, error=error)))
        if self._minute_end is None:
            self._minute_end = self._loop.call_later(_MINUTE_S, self._end_minute)

    def _has_room(self) -> bool:
        """Whether the queue and the file have space for denials (rule 3)."""
        is_full = self._file.size_bytes >= DENIALS_FILE_BYTES_MAX
        if is_full and not self._is_full:
            _log.warning(
                "audit.denials_omitted path=%s bytes=%d", self._file.path, self._file.size_bytes
            )
        self._is_full = is_full
        return not is_full and self._queue.qsize() < QUEUE_LINES_MAX

    def _end_minute(self) -> None:
        """Write how often each denial of this minute was repeated, and reset the counts."""
        if self._minute_end is not None:
            self._minute_end.cancel()
            self._minute_end = None
        has_room = self._has_room()
        for denial in self._denials.take_all():
            if denial.repeated_count and has_room:
                self._put(_Line(self._encode({**denial.fields, "repeated": denial.repeated_count})))

    def log_revision(self, permissions: Permissions) -> None:
        """Write a line: the daemon now applies this revision of the permissions."""
        fields: dict[str, object] = {
            "principal": permissions.changed_by,
            "address": "",
            "verb": "",
            "object": "permissions",
            "message": f"revision {permissions.revision} of {_time_text(permissions.changed_ms)}",
        }
        self._put(_Line(self._encode({**fields, "outcome": "in_use"}), is_kept=True))

    def reopen(self) -> None:
        """Open the file of this name again, after the waiting lines are written.

        Log the outcome.
        """
        self._queue.put(_Command(is_end=False))

    async def close(self) -> None:
        """Write the waiting lines and close the file.

        The disk may hang, so return after at most `CLOSE_S_MAX`.
        """
        self._end_minute()
        self._queue.put(_Command(is_end=True))
        await asyncio.to_thread(self._thread.join, CLOSE_S_MAX)

    def _begin_request(self, fields: dict[str, object], on_written: WrittenCallback) -> None:
        if self._queue.qsize() >= QUEUE_LINES_MAX:
            self._loop.call_soon(
                on_written,
                Overloaded(
                    f"{QUEUE_LINES_MAX} lines already wait for the audit log, which is the limit"
                ),
            )
            return
        self._put(_Line(self._encode({**fields, "outcome": "begun"}), on_written=on_written))

    def _end_request(self, fields: dict[str, object], outcome: str, error: str) -> None:
        line = self._encode({**fields, "outcome": outcome}, error=error)
        self._put(_Line(line, is_kept=True))

    def _encode(self, fields: dict[str, object], *, error: str = "") -> bytes:
        line = {"time": _time_text(self._clock_ms()), **fields}
        if error:
            line["error"] = _truncate_text(error)
        return json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"  # rule 5

    def _put(self, line: _Line) -> None:
        self._queue.put(line)

    def _report(self, outcomes: Sequence[tuple[WrittenCallback, WaltzError | None]]) -> None:
        for on_written, error in outcomes:
            on_written(error)

    # ---- on its own thread (rule 4)

    def _serve(self) -> None:
        lines: list[_Line] = []
        while True:
            entry = self._queue.get()
            if isinstance(entry, _Line):
                lines.append(entry)
                if len(lines) < _BATCH_LINES_MAX and not self._queue.empty():
                    continue
            self._write(lines)
            lines = []
            if isinstance(entry, _Command):
                if entry.is_end:
                    self._file.close()
                    return
                self._reopen()

    def _write(self, lines: list[_Line]) -> None:
        lines = self._kept_lines + lines
        if not lines:
            return
        written_count, failure = self._file.write([line.data for line in lines])
        failed = lines[written_count:]
        kept_lines = [line for line in failed if line.is_kept]
        self._kept_lines = kept_lines[-QUEUE_LINES_MAX:]
        self._lost_count += len(failed) - len(self._kept_lines)
        error = None
        if failure is not None:
            error = Unavailable(
                f"the audit log cannot be written: {failure.strerror}. Hint: the daemon's "
                "log names the file (`audit.write_failed`)."
            )
        outcomes: list[tuple[WrittenCallback, WaltzError | None]] = [
            (line.on_written, error if number >= written_count else None)
            for number, line in enumerate(lines)
            if line.on_written is not None
        ]
        self._log_change(failure)
        with contextlib.suppress(RuntimeError):  # The loop is closed: the process exits.
            self._loop.call_soon_threadsafe(self._report, outcomes)

    def _log_change(self, failure: OSError | None) -> None:
        """Log when writing begins to fail, and when it succeeds again."""
        if failure is not None and not self._has_failed:
            _log.error("audit.write_failed path=%s error=%s", self._file.path, failure.strerror)
        if failure is None and self._has_failed:
            _log.info("audit.write_resumed path=%s lost=%d", self._file.path, self._lost_count)
            self._lost_count = 0
        self._has_failed = failure is not None

    def _reopen(self) -> None:
        try:
            new_file = _OpenAuditFile(self._file.path)
        except OSError as error:  # the lines are written to the file that is open
            _log.error("audit.open_failed path=%s error=%s", self._file.path, error.strerror)
            return
        self._file.close()
        self._file = new_file
        _log.info("audit.opened path=%s", new_file.path)


class AuditedRequest:
    """An administrative request in the audit log (rules 1 and 2)."""

    def __init__(self, log: AuditFile, fields: dict[str, object]) -> None:
        self._log = log
        self._fields = fields

    def begin(self, on_written: WrittenCallback) -> None:
        """Write the first line of the request, and call `on_written` afterwards.

        `on_written` receives an error if the request must be rejected, and None otherwise.
        """
        self._log._begin_request(self._fields, on_written)

    def end(self, outcome: str, error: str = "") -> None:
        """Write the outcome of the request: "done", "rejected" with an error, or "unknown"."""
        self._log._end_request(self._fields, outcome, error)


class _DenialKind(NamedTuple):
    """The fields that denials on one line have in common (rule 3)."""

    principal: str
    host: str
    message: type[Message]
    requirement: Requirement | str
    partitions: tuple[int, ...]

    @staticmethod
    def from_request(peer: Peer, requirement: Requirement | str, message: Message) -> "_DenialKind":
        partitions: tuple[int, ...] = ()
        if isinstance(requirement, Requirement) and requirement.scope is Scope.NAMED:
            named_partitions = message.named_partitions()  # a peer can name thousands
            partitions = (len(named_partitions), *named_partitions[:_COMPARED_PARTITIONS_MAX])
        host = network_of(peer.address.rpartition(":")[0])
        return _DenialKind(peer.principal, host, type(message), requirement, partitions)


@dataclasses.dataclass(slots=True)
class _RecordedDenial:
    """A denial that was written: the fields of its line, and the number of repetitions."""

    fields: dict[str, object]
    repeated_count: int = 0


class _Denials:
    """The denials of the current minute (rule 3), at most `DENIALS_MAX`."""

    def __init__(self) -> None:
        self.omitted_count = 0
        self.minute = 0
        self.recorded: dict[_DenialKind, _RecordedDenial] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def should_write(self, kind: _DenialKind, *, has_room: bool) -> bool:
        """Whether the caller must write a denial, and add it to `recorded`.

        Otherwise this method counts the denial as repeated or omitted.
        """
        recorded_denial = self.recorded.get(kind)
        if recorded_denial is not None:
            recorded_denial.repeated_count += 1
            return False
        keys = ("principal", kind.principal), ("host", kind.host)
        is_over = any(self._counts[key] >= DENIALS_PER_PEER_MAX for key in keys)
        if is_over or len(self.recorded) >= DENIALS_MAX or not has_room:
            self.omitted_count += 1
            return False
        self._counts.update(keys)
        return True

    def take_all(self) -> list[_RecordedDenial]:
        denials, self.recorded = list(self.recorded.values()), {}
        self._counts.clear()
        return denials

    def take_omitted(self) -> int:
        omitted, self.omitted_count = self.omitted_count, 0
        return omitted


class _OpenAuditFile:
    """The open audit file; the constructor raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        self.size_bytes = size = os.fstat(self._fd).st_size
        # The previous process may have left an incomplete line.
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
        """Append lines; return the number of lines that were written completely, and the error."""
        start = b"\n" if self._is_torn else b""
        data, done_bytes, failure = memoryview(start + b"".join(lines)), 0, None
        try:
            while done_bytes < len(data):
                done_bytes += os.write(self._fd, data[done_bytes:])
        except OSError as error:
            failure = error
        end, whole_count = len(start), 0
        for line in lines:
            if end + len(line) > done_bytes:
                break
            end += len(line)
            whole_count += 1
        self.size_bytes += done_bytes
        if done_bytes:
            self._is_torn = done_bytes != end
        return whole_count, failure

    def close(self) -> None:
        os.close(self._fd)


def is_administrative(requirement: Requirement) -> bool:
    """Whether the audit log records requests with this requirement."""
    return requirement.needs_all and ADMINISTER in requirement.verbs


def _fields_of(peer: Peer, requirement: Requirement | str, message: Message) -> dict[str, object]:
    if isinstance(requirement, str):
        verbs, object_text = "", requirement
    else:
        separator = " and " if requirement.needs_all else " or "
        verbs = separator.join(verb.value for verb in requirement.verbs)
        object_text = _object_text(requirement, message)
    return {
        "principal": peer.principal,
        "address": peer.address,
        "verb": verbs,
        "object": object_text,
        "message": _message_text(message),
    }


def _object_text(requirement: Requirement, message: Message) -> str:
    if requirement.scope is Scope.ALL:
        return "all partitions"
    named_partitions = message.named_partitions() if requirement.scope is Scope.NAMED else ()
    # A peer can name millions of partitions, which would take seconds to convert.
    if len(named_partitions) > _PARTITIONS_MAX:
        return f"{len(named_partitions)} partitions"
    return (
        _truncate_text(f"partitions {format_ranges(ranges_of(named_partitions))}")
        if named_partitions
        else "any partition"
    )


def _message_text(message: Message) -> str:
    """Return the name of a message with its fields; a long field is replaced by its size."""
    parts = [type(message).__name__]
    assert dataclasses.is_dataclass(message)
    for message_field in dataclasses.fields(message):
        if message_field.name in _OMITTED_FIELDS or not message_field.repr:  # a token has no repr
            continue
        value = getattr(message, message_field.name)
        parts.append(f"{message_field.name}={_value_text(value)}")
    return _truncate_text(" ".join(parts))


def _value_text(value: object) -> str:
    if isinstance(value, Sized) and not isinstance(value, str):
        return f"({len(value)})"
    return value.name if isinstance(value, Enum) else str(value)


def _truncate_text(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS_MAX else f"{text[:_TEXT_CHARACTERS_MAX]}.."


def _time_text(at_ms: int) -> str:
    try:
        text = datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (OverflowError, ValueError, OSError):  # a time that another program wrote
        return f"{at_ms} ms"
    return f"{text}.{at_ms % 1000:03}Z"
