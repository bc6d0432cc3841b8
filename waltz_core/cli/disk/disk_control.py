"""`waltz-core disk dump-control-file`: print the control file and control slots of a storage."""

from pathlib import Path

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.disk.disk_text import fields_json, utc_text, uuid_text
from waltz_core.cli.output import print_json, print_result, print_table
from waltz_core.cli.subcommands import subcommand
from waltz_core.errors import BadRequest
from waltz_core.offline.files import is_storage_directory, partitions_in, read_all
from waltz_core.offline.layout import (
    ASSIGNED,
    AVAILABLE,
    CONTROL_FILE_NAME,
    DIRTY,
    ID_NAME,
    PROVISIONAL,
    SHORTENED,
    SLOTS_FILE_NAME,
    SUSPECT,
    TRUNCATE,
    ControlEntry,
    ControlSlot,
    current_slot,
    decode_storage_id,
)
from waltz_core.offline.verify_control import (
    DecodedControlFile,
    is_assigned,
    read_control,
    read_slots,
)

_INFO_FLAGS = {AVAILABLE: "available", ASSIGNED: "assigned"}
_SLOT_FLAGS = {
    DIRTY: "dirty",
    SUSPECT: "suspect",
    PROVISIONAL: "provisional",
    TRUNCATE: "truncating",
    SHORTENED: "shortens a batch",
}


@subcommand
@click.option(
    "-a", "--assigned", is_flag=True, help="print only partitions that are assigned to the storage"
)
@options.storage_file_options(
    "a storage directory, a partition's directory, or a file waltz-storage.ctl or waltz-x.ctl"
)
def dump_control_file(
    *, path: Path, partitions: list[int] | None, assigned: bool, as_json: bool
) -> int:
    """Print the control file and the control slots, even if they are damaged."""
    control, identity, slot_paths = _read_control_files(path)
    entries = dict(enumerate(control.entries)) if control is not None else {}
    numbers = sorted({*entries, *slot_paths})
    missing = set(partitions or ()) - set(numbers)
    if missing:
        numbers_text = f"{numbers[0]}..{numbers[-1]}" if numbers else "none"
        raise BadRequest(
            f"{path}: there is no partition {min(missing)}; expected one of {numbers_text}"
        )
    shown_numbers = [number for number in numbers if partitions is None or number in partitions]
    if assigned:
        shown_numbers = [number for number in shown_numbers if is_assigned(entries.get(number))]
    slots = {
        number: read_slots(path) for number, path in slot_paths.items() if number in shown_numbers
    }
    if as_json:
        value = {
            "control_file": None if control is None else _header_json(control),
            "storage_id": None if identity is None else _storage_id_json(identity),
            "partitions": [
                _partition_json(number, entries.get(number), slots.get(number))
                for number in shown_numbers
            ],
        }
        print_json(value)
        return 0
    if control is not None:
        _print_control(
            control, {number: entries[number] for number in shown_numbers if number in entries}
        )
        print_result("")
    if identity is not None:
        storage, errors = decode_storage_id(identity)
        print_result(f"{ID_NAME}: storage {uuid_text(storage)}{_errors_text(errors)}")
        print_result("")
    for number, slots_of_partition in slots.items():
        if slots_of_partition is not None:
            _print_slots(number, slots_of_partition)
    return 0


def _read_control_files(
    path: Path,
) -> tuple[DecodedControlFile | None, bytes | None, dict[int, Path]]:
    """Return the control file and the ID of a storage, and its slot files by partition."""
    if path.is_file() and path.name == SLOTS_FILE_NAME:
        return None, None, {_partition_number(path.absolute().parent): path}
    if path.is_file() and path.name == CONTROL_FILE_NAME:
        return read_control(path), None, {}
    if path.is_dir() and is_storage_directory(path):
        slot_paths = {
            number: path / str(number) / SLOTS_FILE_NAME for number in partitions_in(path)
        }
        return read_control(path / CONTROL_FILE_NAME), read_all(path / ID_NAME), slot_paths
    if path.is_dir() and (path / SLOTS_FILE_NAME).exists():
        return None, None, {_partition_number(path.absolute()): path / SLOTS_FILE_NAME}
    raise BadRequest(f"{path}: expected a directory with {CONTROL_FILE_NAME} or {SLOTS_FILE_NAME}")


def _partition_number(directory: Path) -> int:
    if not directory.name.isdecimal():
        raise BadRequest(f"{directory}: expected a directory whose name is a partition number")
    return int(directory.name)


def _errors_text(errors: tuple[str, ...]) -> str:
    return f"; wrong: {'; '.join(errors)}" if errors else ""


def _flag_names(flags: int, names_by_bit: dict[int, str]) -> list[str]:
    names = [name for bit, name in names_by_bit.items() if flags & bit]
    unknown_bits = flags & ~sum(names_by_bit)
    return [*names, f"{unknown_bits:#x}"] if unknown_bits else names


# ---------------------------------------------------------------------------------------------
# JSON for programs


def _header_json(control: DecodedControlFile) -> dict[str, object]:
    header = control.header
    return {
        "version": header.version,
        "created": utc_text(header.created_ms),
        "created_ms": header.created_ms,
        "cluster_key": uuid_text(header.cluster_key),
        "partition_count": header.partition_count,
        "bytes": control.size,
        "wrong": header.errors,
    }


def _storage_id_json(data: bytes) -> dict[str, object]:
    number, errors = decode_storage_id(data)
    return {"id": uuid_text(number), "wrong": errors}


def _partition_json(
    number: int, entry: ControlEntry | None, slots: tuple[ControlSlot, ControlSlot] | None
) -> dict[str, object]:
    value: dict[str, object] = {"partition": number}
    if entry is not None:
        value["wrong"] = entry.errors
        value["structures"] = [
            {
                **fields_json(info),
                "flags": _flag_names(info.flags, _INFO_FLAGS),
                "counts": position == entry.current,
            }
            for position, info in enumerate(entry.infos)
        ]
    if slots is not None:
        counts = current_slot(slots, number)
        value["slots"] = [_slot_json(slot, is_current=slot is counts) for slot in slots]
    return value


def _slot_json(slot: ControlSlot, *, is_current: bool) -> dict[str, object]:
    value: dict[str, object] = fields_json(slot)
    first, last, session, stamp_ms, chain = slot.shortened
    value |= {
        "flags": _flag_names(slot.flags, _SLOT_FLAGS),
        "nonce": slot.nonce.hex(),
        "acked_chain": slot.acked_chain.hex(),
        "start_chain": slot.start_chain.hex(),
        "shortened": None
        if not slot.flags & SHORTENED
        else {
            "first": first,
            "last": last,
            "session": session,
            "stamp_ms": stamp_ms,
            "chain": chain.hex(),
        },
        "counts": is_current,
    }
    if not slot.flags & PROVISIONAL:
        value["provisional_session"] = value["provisional_mark"] = None
    if not slot.flags & TRUNCATE:
        value["truncate_to"] = None
    return value


# ---------------------------------------------------------------------------------------------
# Tables for people


def _print_control(control: DecodedControlFile, entries: dict[int, ControlEntry]) -> None:
    header = control.header
    print_result(
        f"{CONTROL_FILE_NAME}: version {header.version}, {control.size} bytes, "
        f"{header.partition_count} partitions, created {utc_text(header.created_ms)}, cluster key "
        f"{uuid_text(header.cluster_key)}{_errors_text(header.errors)}"
    )
    rows = []
    for number, entry in entries.items():
        for position, info in enumerate(entry.infos):
            rows.append(
                (
                    number,
                    position + 1,
                    "counts" if position == entry.current else "-",
                    info.session,
                    info.low_water_mark,
                    info.local_low_water_mark,
                    " ".join(_flag_names(info.flags, _INFO_FLAGS)) or "-",
                    info.sequence,
                    "; ".join(info.errors) or "valid",
                )
            )
    titles = ("partition", "structure", "", "session", "low-water mark", "local mark", "flags")
    print_table((*titles, "sequence", "CRC and values"), rows)
    for entry in entries.values():
        for error in entry.errors:
            print_result(f"partition {entry.number}: {error}")


def _print_slots(number: int, slots: tuple[ControlSlot, ControlSlot]) -> None:
    counts = current_slot(slots, number)
    print_result(f"{number}/{SLOTS_FILE_NAME}")
    columns = [_slot_texts(slot, is_current=slot is counts) for slot in slots]
    print_table(
        ("", "slot 0", "slot 1"),
        [(title, columns[0][title], columns[1][title]) for title in columns[0]],
    )
    print_result("")


def _slot_texts(slot: ControlSlot, *, is_current: bool) -> dict[str, str]:
    provisional = "-"
    if slot.flags & PROVISIONAL:
        provisional = f"{slot.provisional_mark} of session {slot.provisional_session}"
    shortened_text = (
        f", shortens batch {slot.shortened[0]}..{slot.shortened[1]}"
        if slot.flags & SHORTENED
        else ""
    )
    return {
        "counts": "yes" if is_current else "no",
        "CRC and values": "; ".join(slot.errors) or "valid",
        "version": str(slot.version),
        "partition": str(slot.partition),
        "sequence": str(slot.sequence),
        "sequence of 0.13": str(slot.control_file_sequence),
        "flags": " ".join(_flag_names(slot.flags, _SLOT_FLAGS)) or "-",
        "promised session": str(slot.promised),
        "nonce": slot.nonce.hex(),
        "last session": str(slot.last_session),
        "engaged session": str(slot.engaged),
        "low-water mark": str(slot.low_water_mark),
        "provisional mark": provisional,
        "log begins after": str(slot.start),
        "chain hash at log start": slot.start_chain.hex(),
        "acked ID": str(slot.acked),
        "chain hash at acked ID": slot.acked_chain.hex(),
        "truncate to": f"{slot.truncate_to}{shortened_text}" if slot.flags & TRUNCATE else "-",
        "damaged": " ".join(f"{first}..{last}" for first, last in slot.damaged) or "-",
    }
