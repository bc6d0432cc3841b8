"""The driver: order of steps and effects, wake-ups, and failures of machines."""

import asyncio
import logging

import pytest

from tests.loops import run_on_loop
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.driver import Driver, loop_clock_ms
from waltz_core.machine import Report, Wakeup
from waltz_core.transport import net


class Echo:
    """Answers each event with the effects that a script has for it."""

    def __init__(self, script, wake_at_ms=None):
        self.script = script
        self.seen = []
        self.wake_at_ms = wake_at_ms

    def step(self, event, now_ms):
        self.seen.append((event, now_ms))
        found = self.script.get(event, ())
        if isinstance(found, Exception):
            raise found
        return found


@run_on_loop
async def test_effects_are_performed_in_order_before_the_next_event():
    done = []
    machine = Echo({"a": ("1", "2"), "b": ("3",)})

    def perform(effect):
        done.append(effect)
        if effect == "1":
            driver.post("b")  # an effect with an immediate outcome

    driver = Driver(machine, perform)
    driver.post("a")
    assert done == ["1", "2", "3"]
    assert [event for event, _ in machine.seen] == ["a", "b"]


@run_on_loop
async def test_reports_are_passed_to_their_callback():
    reports, done = [], []
    machine = Echo({"a": (Report("x.y", (("n", 1),)), "1")})
    driver = Driver(machine, done.append, on_report=reports.append)
    driver.post("a")
    assert (reports, done) == ([Report("x.y", (("n", 1),))], ["1"])


def test_reports_without_a_receiver_are_logged(caplog):
    async def program():
        Driver(Echo({"a": (Report("x.y", (("n", 1),)),)}), print, name="m").post("a")

    with caplog.at_level(logging.DEBUG):
        net.run(program())
    assert "x.y machine=m n=1" in caplog.text
    assert "machine.step machine=m input='a'" in caplog.text


@pytest.mark.parametrize("time_ms", [100, 32_914_339, 32_914_340, 4_000_000_003])
def test_the_clock_returns_each_whole_millisecond_of_the_loop(monkeypatch, time_ms):
    async def program():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: time_ms / 1000)
        return loop_clock_ms()

    assert asyncio.run(program()) == time_ms


@run_on_loop
async def test_a_machine_is_woken_at_its_time_and_can_be_woken_again():
    machine = Echo({Wakeup(): ("woken",)})
    woken = asyncio.Event()

    def perform(effect):
        machine.wake_at_ms = None
        woken.set()

    wanted = machine.wake_at_ms = loop_clock_ms() + 20
    driver = Driver(machine, perform)
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await woken.wait()
    ((event, now_ms),) = machine.seen
    assert event == Wakeup()
    assert now_ms >= wanted
    woken.clear()
    machine.wake_at_ms = loop_clock_ms() + 5
    driver.post("nothing")
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await woken.wait()
    assert [event for event, _ in machine.seen] == [Wakeup(), "nothing", Wakeup()]


@run_on_loop
async def test_a_wakeup_can_be_moved_earlier_and_later():
    machine = Echo({Wakeup(): ("woken",)}, wake_at_ms=loop_clock_ms() + 60_000)
    woken = asyncio.Event()

    def perform(_effect):
        if machine.seen[-1][1] >= wanted:  # The timer was set for the earlier time.
            machine.wake_at_ms = None
            woken.set()

    driver = Driver(machine, perform)
    wanted = machine.wake_at_ms = loop_clock_ms() + 10
    driver.post("earlier")
    wanted = machine.wake_at_ms = wanted + 30
    driver.post("later")
    async with asyncio.timeout(TEST_TIMEOUT_S):
        await woken.wait()
    assert [event for event, _ in machine.seen[:2]] == ["earlier", "later"]


@run_on_loop
async def test_an_exception_stops_the_machine_and_notifies_its_owner_once():
    failures, done = [], []
    error = ValueError("broken")
    machine = Echo({"bad": error, "good": ("1",)}, wake_at_ms=1 << 60)
    driver = Driver(machine, done.append, on_failure=failures.append)
    driver.post("bad")
    driver.post("good")
    driver.post("bad")
    assert failures == [error]
    assert done == []
    assert driver.is_stopped
    assert len(machine.seen) == 1


@run_on_loop
async def test_a_failed_effect_stops_the_machine():
    failures = []

    def perform(_effect):
        raise RuntimeError("no")

    driver = Driver(Echo({"a": ("1", "2")}), perform, on_failure=failures.append)
    driver.post("a")
    assert [str(error) for error in failures] == ["no"]


@run_on_loop
async def test_a_stopped_driver_ignores_events():
    machine = Echo({"a": ("1",)}, wake_at_ms=0)
    driver = Driver(machine, print)
    driver.stop()
    driver.stop()
    driver.post("a")
    for _ in range(5):
        await asyncio.sleep(0)
    assert machine.seen == []


@run_on_loop
async def test_the_clock_can_be_replaced():
    machine = Echo({})
    driver = Driver(machine, print, clock=lambda: 42)
    driver.post("a")
    assert machine.seen == [("a", 42)]
