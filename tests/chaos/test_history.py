"""The checkers of chaos accept a correct history and reject each falsified one."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.client import FEED_ENTRY
from tests.chaos.history import ClientRun, Log, check_history, longest_gap_s
from tests.fault.load import four_writers

LOCK, OTHER = 7, 8


def content(key: str, *, mark: int, writes: list[int]) -> Any:
    return four_writers.Content(key, 0, mark, writes, [], [])


# Two writers of one lock, and a third writer (`REJECTED`) whose mark is too low. The second session
# begins at ID 2.
ROWS = [
    content("a", mark=-1, writes=[LOCK]),
    content("b", mark=0, writes=[LOCK]),
    content("d", mark=1, writes=[OTHER]),
]
REJECTED = content("c", mark=0, writes=[LOCK])


def request_id(number: int) -> tuple[int, int, int, int]:
    return (5, 1, 0, number)


class History:
    """The files of one run of a client, and the log to compare them with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[list[Any]] = []
        for at, row in enumerate([*ROWS, REJECTED]):
            self.sent(row, at=float(at))
        for at, row in enumerate(ROWS):
            self.lines.append(["reported", row.key, "committed", at, at + 0.5, ""])
        self.lines.append(["reported", "c", "rejected", -1, 3.5, ""])
        self.lines.append(["mark", 0, 3.0, 2])
        self.fed = [(0, number, *request_id(number)) for number in range(len(ROWS))]
        self.log = Log(
            [
                four_writers.Entry(
                    0, at, FEED_ENTRY.pack(0, 0, *request_id(at))[12:], row.to_bytes()
                )
                for at, row in enumerate(ROWS)
            ],
            {0: [0, 2]},
        )

    def sent(self, row: Any, *, at: float) -> None:
        digest = four_writers.digest_of(row.to_bytes())
        self.lines.append(["sent", row.key, 0, digest, at, row.mark, row.writes])

    def current_run(self) -> ClientRun:
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        (self.directory / "one.jsonl").write_text(text)
        (self.directory / "one.feed").write_bytes(
            b"".join(FEED_ENTRY.pack(*each) for each in self.fed)
        )
        client_run = ClientRun("one", self.directory)
        client_run.poll()
        return client_run

    def wrong(self) -> list[str]:
        found: list[str] = check_history([self.current_run()], self.log).wrong
        return found


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


def test_a_correct_history_passes(history: History):
    verdict = check_history([history.current_run()], history.log)
    assert verdict.wrong == []
    assert verdict.counts["committed"] == 3
    assert verdict.counts["rejected"] == 1
    assert verdict.counts["rejected by a new session"] == 0
    assert verdict.counts["fed"] == 3
    assert verdict.counts["requested marks"] == 1


def test_a_rejection_without_a_conflicting_writer_is_detected(history: History):
    history.log.sessions = {0: [0]}
    history.sent(content("e", mark=1, writes=[LOCK]), at=4.0)
    history.lines.append(["reported", "e", "rejected", -1, 4.5, ""])
    assert any("no client had written its locks" in problem for problem in history.wrong())


def test_a_conflicting_write_after_a_rejection_does_not_explain_the_rejection(history: History):
    history.log.sessions = {0: [0]}
    history.sent(content("e", mark=1, writes=[OTHER]), at=1.5)
    history.lines.append(["reported", "e", "rejected", -1, 1.9, ""])
    assert any("no client had written its locks" in problem for problem in history.wrong())


def test_a_new_session_may_reject_without_a_conflict_at_most_the_appends_in_flight(
    history: History,
):
    history.sent(content("e", mark=0, writes=[OTHER + 1]), at=4.0)
    history.lines.append(["reported", "e", "rejected", -1, 4.5, ""])
    verdict = check_history([history.current_run()], history.log)
    assert verdict.wrong == []
    assert verdict.counts["rejected by a new session"] == 1
    for number in range(200):
        history.sent(content(f"f{number}", mark=0, writes=[OTHER + 1]), at=4.0)
        history.lines.append(["reported", f"f{number}", "rejected", -1, 4.5, ""])
    assert any("rejections without a conflict" in problem for problem in history.wrong())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda fed: fed.pop(), "fed partition 0 up to 1, its end is 2"),
        (lambda fed: fed.pop(1), "was fed 0/2, expected 1"),
        (lambda fed: fed.append(fed[-1]), "was fed 0/2, expected 3"),
        (lambda fed: fed.insert(1, (0, 1, *request_id(9))), "was fed another transaction at 0/1"),
    ],
)
def test_a_feed_that_differs_from_the_log_is_detected(history: History, change: Any, problem: str):
    change(history.fed)
    assert any(problem in each for each in history.wrong())


def test_the_recorded_feed_of_a_killed_process_may_end_early(history: History):
    del history.fed[1:]
    client_run = history.current_run()
    client_run.has_ended = True
    with (history.directory / "one.feed").open("ab") as feed:
        feed.write(b"torn")
    assert check_history([client_run], history.log).wrong == []


@pytest.mark.parametrize("mark", [1, 3])
def test_a_mark_below_a_reported_commit_or_above_the_log_is_detected(history: History, mark: int):
    history.lines[-1] = ["mark", 0, 3.0, mark]
    assert any(f"received mark {mark}" in problem for problem in history.wrong())


def test_a_reported_commit_that_is_missing_in_the_log_is_detected(history: History):
    history.lines[-2] = ["reported", "c", "committed", 3, 3.5, ""]
    assert any("c was reported as committed, but is not" in problem for problem in history.wrong())


def test_an_incomplete_line_of_a_recording_is_read_only_after_its_end_was_written(history: History):
    client_run = history.current_run()
    path = history.directory / "one.jsonl"
    before = path.read_bytes()
    line = json.dumps(["reported", "d", "lost", -1, 9.0, "why"]).encode() + b"\n"
    path.write_bytes(before + line[:10])
    client_run.poll()
    assert client_run.sent["d"].recorded.outcome == "committed"
    path.write_bytes(before + line)
    client_run.poll()
    assert client_run.sent["d"].recorded.outcome == "lost"


def test_the_first_commit_after_a_time_and_the_longest_gap_between_commits_are_found(
    history: History,
):
    client_run = history.current_run()
    assert client_run.first_commit_s(0, 1.0) == 1.5
    assert client_run.first_commit_s(0, 2.5) is None
    assert longest_gap_s([client_run], 0, since_s=0.0, until_s=9.5) == 7.0
    assert longest_gap_s([client_run], 1, since_s=0.0, until_s=4.0) == 4.0
