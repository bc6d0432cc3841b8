"""Requests that several callers share: answers, failures and timeouts."""

import asyncio
import gc

from tests.loops import run_on_virtual_loop
from waltz_core.cluster.znodes.shared_request import SharedRequest
from waltz_core.errors import CoordinatorUnavailable


class CountingQuery:
    """A query that answers when the test permits it, and counts the requests."""

    def __init__(self) -> None:
        self.query_count = 0
        self.may_answer = asyncio.Semaphore(0)

    async def run_query(self) -> None:
        self.query_count += 1
        await self.may_answer.acquire()


async def _turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@run_on_virtual_loop
async def test_a_request_that_arrives_during_a_query_starts_another_query():
    query = CountingQuery()
    shared_request = SharedRequest(query.run_query)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(shared_request.wait_for_answer())
        await _turns()
        late_callers = [tasks.create_task(shared_request.wait_for_answer()) for _ in range(2)]
        await _turns()
        assert query.query_count == 1
        query.may_answer.release()
        await first
        await _turns()
        assert not any(late_caller.done() for late_caller in late_callers)
        assert query.query_count == 2
        query.may_answer.release()


@run_on_virtual_loop
async def test_a_failure_is_returned_only_to_the_callers_of_its_request():
    answers = [CoordinatorUnavailable("away"), None]
    messages: list[str] = []

    async def run_query() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    shared_request = SharedRequest(run_query)

    async def record_error() -> None:
        try:
            await shared_request.wait_for_answer()
        except CoordinatorUnavailable as error:
            messages.append(str(error))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(record_error())
        tasks.create_task(record_error())
    await record_error()
    assert messages == ["away", "away"]
    assert not answers


@run_on_virtual_loop
async def test_other_callers_get_the_answer_if_one_caller_times_out():
    query = CountingQuery()
    shared_request = SharedRequest(query.run_query)
    async with asyncio.TaskGroup() as tasks:
        timed_out_caller = tasks.create_task(shared_request.wait_for_answer())
        waiting_caller = tasks.create_task(shared_request.wait_for_answer())
        await _turns()
        timed_out_caller.cancel()
        await _turns()
        query.may_answer.release()
        await waiting_caller
    assert timed_out_caller.cancelled()
    assert query.query_count == 1


def test_a_failure_that_no_caller_awaits_is_not_reported_to_the_event_loop():
    async def scenario() -> list[str]:
        loop_errors: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: loop_errors.append(context["message"]))
        may_fail = asyncio.Event()

        async def run_query() -> None:
            await may_fail.wait()
            raise CoordinatorUnavailable("closed")

        shared_request = SharedRequest(run_query)
        pending_request = loop.create_task(shared_request.wait_for_answer())
        await _turns()
        pending_request.cancel()
        await _turns()
        may_fail.set()
        await _turns()
        del shared_request, pending_request
        gc.collect()
        await _turns()
        return loop_errors

    assert asyncio.run(scenario()) == []
