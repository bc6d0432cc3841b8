"""Lock hashes and slots, against values of Waltz 0.13 (docs/design/wire-format.md 4)."""

import json
from pathlib import Path

import pytest

from waltz_core.records.record import lock_hash
from waltz_core.server.locking.lock_table import slot_indices

EXAMPLES = json.loads((Path(__file__).parent / "locks.json").read_text(encoding="utf-8"))


def test_the_golden_file_of_locks_has_at_least_ten_examples() -> None:
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e['name']}-{e['id']}")
def test_a_lock_has_the_hash_of_waltz_0_13(example: dict[str, object]) -> None:
    assert lock_hash(str(example["name"]), int(str(example["id"]))) == example["hash_signed"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e['name']}-{e['id']}")
def test_a_lock_has_the_slots_of_waltz_0_13(example: dict[str, object]) -> None:
    slots = slot_indices([int(str(example["hash_signed"]))], int(str(example["tableSize"])))
    assert slots[:, 0].tolist() == example["indices"]


def test_many_locks_have_the_slots_of_waltz_0_13() -> None:
    slots = slot_indices([e["hash_signed"] for e in EXAMPLES], 30_000)
    assert slots.T.tolist() == [e["indices"] for e in EXAMPLES]
