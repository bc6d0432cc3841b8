"""Fair queueing by bytes: turns, order within a lane, and no credit for idle time."""

import random
from dataclasses import dataclass

import pytest

from waltz_core.server.append.lanes import Lanes
from waltz_core.server.partition_events import ConnectionId


@dataclass(frozen=True)
class Item:
    connection: ConnectionId
    name: str
    cost_bytes: int = 10

    @property
    def is_large(self) -> bool:
        return self.cost_bytes > 2_000


def item(connection: int, name: str, cost_bytes: int = 10) -> Item:
    return Item(ConnectionId(connection), name, cost_bytes)


def take_all(lanes: Lanes[Item]) -> list[str]:
    names = []
    while (each := lanes.take()) is not None:
        names.append(each.name)
    return names


def test_lanes_of_equal_requests_take_turns_and_keep_their_order() -> None:
    lanes: Lanes[Item] = Lanes()
    for each in (item(1, "a1"), item(1, "a2"), item(1, "a3"), item(2, "b1"), item(3, "c1")):
        lanes.push(each)
    assert take_all(lanes) == ["a1", "b1", "c1", "a2", "a3"]
    assert not lanes
    assert lanes.queued_bytes == 0


def test_requests_of_a_light_connection_precede_requests_of_heavy_connections() -> None:
    lanes: Lanes[Item] = Lanes()
    for flood in (1, 2, 3):
        for number in range(3):
            lanes.push(item(flood, f"{flood}:{number}", 1_000))
    first = lanes.take()
    assert first is not None
    for number in range(5):
        lanes.push(item(9, f"small{number}"))
    # A lane that becomes busy starts at the clock of the lane served last.
    assert take_all(lanes)[:8] == [
        "2:0", "3:0", "small0", "small1", "small2", "small3", "small4", "1:1"
    ]  # fmt: skip


def test_an_empty_lane_does_not_accumulate_turns() -> None:
    lanes: Lanes[Item] = Lanes()
    lanes.push(item(1, "a0", 1_000))
    lanes.push(item(2, "idle"))
    assert take_all(lanes) == ["a0", "idle"]
    for number in range(4):
        lanes.push(item(1, f"a{number}", 100))
        lanes.push(item(2, f"b{number}", 100))
    assert take_all(lanes) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


def test_a_returning_connection_is_still_charged_for_its_earlier_requests() -> None:
    lanes: Lanes[Item] = Lanes()
    lanes.push(item(1, "big", 1_000))
    lanes.push(item(2, "x0", 100))
    lanes.push(item(2, "x1", 100))
    assert [each.name for each in (lanes.take(), lanes.take()) if each] == ["big", "x0"]
    lanes.push(item(1, "again", 10))
    assert take_all(lanes) == ["x1", "again"]


def test_bytes_are_counted_by_lane_and_in_total() -> None:
    lanes: Lanes[Item] = Lanes()
    lanes.push(item(1, "a1", 100))
    lanes.push(item(2, "b1", 7))
    assert (lanes.queued_bytes, lanes.queued_bytes_of(ConnectionId(1)), lanes.lane_count) == (
        107,
        100,
        2,
    )
    assert [each.name for each in lanes.drop(ConnectionId(1))] == ["a1"]
    assert (lanes.queued_bytes, lanes.queued_bytes_of(ConnectionId(1)), len(lanes)) == (7, 0, 1)
    assert lanes.drop(ConnectionId(1)) == []
    assert [each.name for each in lanes.drop_all()] == ["b1"]
    assert lanes.queued_bytes == 0
    assert lanes.take() is None


def test_a_request_taken_in_parts_stays_first_in_its_lane_and_is_charged_for_each_part() -> None:
    lanes: Lanes[Item] = Lanes()
    lanes.push(item(1, "cut", 3_000))
    lanes.push(item(1, "behind"))
    lanes.charge_part(1_000)
    assert (lanes.queued_bytes, lanes.queued_bytes_of(ConnectionId(1)), len(lanes)) == (
        2_010,
        2_010,
        2,
    )
    for name in ("b0", "b1"):
        lanes.push(item(2, name, 900))
    # The lane of the large request is 1,000 bytes ahead, so another lane gets 1,000 bytes first.
    assert [each.name for each in (lanes.take(), lanes.take()) if each] == ["b0", "b1"]
    lanes.charge_part(0)
    lanes.charge_part(1_999)
    assert take_all(lanes) == ["cut", "behind"]
    assert lanes.queued_bytes == 0
    lanes.push(item(1, "next", 3_000))
    with pytest.raises(AssertionError):
        lanes.charge_part(3_000)


def test_the_rest_of_a_request_is_dropped_with_its_lane() -> None:
    lanes: Lanes[Item] = Lanes()
    lanes.push(item(1, "cut", 3_000))
    lanes.charge_part(1_000)
    assert [each.name for each in lanes.drop(ConnectionId(1))] == ["cut"]
    assert lanes.queued_bytes == 0
    lanes.push(item(1, "whole", 3_000))
    assert take_all(lanes) == ["whole"]
    assert lanes.queued_bytes == 0


def test_small_requests_overtake_waiting_large_requests_of_other_lanes() -> None:
    lanes: Lanes[Item] = Lanes()
    lanes.push(item(1, "large", 3_000))
    lanes.push(item(1, "behind"))
    assert lanes.peek(with_large=False) is lanes.take(with_large=False) is None
    for name in ("b0", "b1", "b2"):
        lanes.push(item(2, name, 2_000))
    names = [each.name for _ in range(2) if (each := lanes.take(with_large=False))]
    assert names == ["b0", "b1"]
    # The turn of the lane is overdue, and no request of this lane overtakes the large request.
    assert take_all(lanes) == ["large", "behind", "b2"]


def test_any_order_of_events_keeps_all_requests_in_lane_order() -> None:
    rng = random.Random(7)
    lanes: Lanes[Item] = Lanes()
    waiting: dict[int, list[str]] = {connection: [] for connection in range(4)}
    for number in range(1_000):
        choice = rng.random()
        connection = rng.randrange(4)
        if choice < 0.5:
            name = f"{connection}:{number}"
            lanes.push(item(connection, name, rng.choice((1, 50, 3_000))))
            waiting[connection].append(name)
        elif choice < 0.6:
            head = lanes.peek()
            if head is not None and head.is_large:
                lanes.charge_part(1)
        elif choice < 0.98:
            found = lanes.take()
            assert (found is None) == (not any(waiting.values()))
            if found is not None:
                assert waiting[found.connection].pop(0) == found.name
        else:
            dropped = lanes.drop(ConnectionId(connection))
            assert [each.name for each in dropped] == waiting[connection]
            waiting[connection].clear()
        assert len(lanes) == sum(map(len, waiting.values()))
        assert bool(lanes) == any(waiting.values())
