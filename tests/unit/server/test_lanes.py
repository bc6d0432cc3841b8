from dataclasses import dataclass

from waltz_core.server.events import ConnectionId
from waltz_core.server.lanes import Lanes


@dataclass(frozen=True)
class Item:
    connection: ConnectionId
    name: str
    cost_bytes: int = 10


def item(connection: int, name: str, cost_bytes: int = 10) -> Item:
    return Item(ConnectionId(connection), name, cost_bytes)


def taken(lanes: Lanes[Item]) -> list[str]:
    names = []
    while (each := lanes.take()) is not None:
        names.append(each.name)
    return names


def test_lanes_take_turns_and_keep_the_order_within_a_lane() -> None:
    lanes: Lanes[Item] = Lanes()
    for each in (item(1, "a1"), item(1, "a2"), item(1, "a3"), item(2, "b1"), item(3, "c1")):
        lanes.push(each)
    assert taken(lanes) == ["a1", "b1", "c1", "a2", "a3"]
    assert not lanes
    assert lanes.bytes == 0


def test_a_lane_that_becomes_busy_goes_last() -> None:
    lanes: Lanes[Item] = Lanes()
    lanes.push(item(1, "a1"))
    lanes.push(item(1, "a2"))
    first = lanes.take()
    assert first is not None
    assert first.name == "a1"
    lanes.push(item(2, "b1"))
    assert taken(lanes) == ["a2", "b1"]


def test_bytes_are_counted_by_lane_and_in_all() -> None:
    lanes: Lanes[Item] = Lanes()
    lanes.push(item(1, "a1", 100))
    lanes.push(item(2, "b1", 7))
    assert (lanes.bytes, lanes.bytes_of(ConnectionId(1)), lanes.lane_count) == (107, 100, 2)
    assert [each.name for each in lanes.drop(ConnectionId(1))] == ["a1"]
    assert (lanes.bytes, lanes.bytes_of(ConnectionId(1)), len(lanes)) == (7, 0, 1)
    assert lanes.drop(ConnectionId(1)) == []
    assert [each.name for each in lanes.drop_all()] == ["b1"]
    assert lanes.bytes == 0
