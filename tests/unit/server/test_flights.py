"""What lies between judgement and outcome."""

from waltz_core.batches import EncodedBatch
from waltz_core.server.flights import Draft


def test_a_draft_is_as_large_as_its_records():
    draft = Draft()
    assert draft.size_bytes == 0
    for number in range(3):
        part = EncodedBatch(number, number, b"\0\0\0\x05", memoryview(b"12345"), b"1234", 0)
        draft.add(part, b"lock")
    assert draft.size_bytes == 15
    assert len(draft.parts) == len(draft.locks) == 3
