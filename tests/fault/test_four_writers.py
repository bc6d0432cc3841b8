"""Runs `examples/four_writers.py` with few transactions, and tests its comparison."""

import subprocess
import sys
from concurrent.futures import Future

import pytest

from tests.fault.load import PROJECT_ROOT, four_writers
from tests.time_limits import TEST_TIMEOUT_S

pytestmark = pytest.mark.fault


@pytest.mark.slow
def test_four_writers_agree_with_the_log(tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, str(PROJECT_ROOT / "examples" / "four_writers.py")),
            *("--transactions", "3000", "--directory", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "four writers: OK"
    assert "storage-2 was killed" in result.stdout


def test_a_late_callback_does_not_change_the_recorded_time_of_an_outcome():
    future: Future[int] = Future()
    recorded_outcome = four_writers.RecordedOutcome("1.1", 0, "digest", sent_s=1.0)
    future.set_result(7)
    four_writers.set_outcomes(four_writers.Pending(future, [recorded_outcome]))
    first_s = recorded_outcome.reported_s
    assert (recorded_outcome.outcome, recorded_outcome.transaction_id, first_s > 1.0) == (
        four_writers.OK,
        7,
        True,
    )
    four_writers.set_report_times([recorded_outcome])
    assert recorded_outcome.reported_s == first_s


def recorded(key: str, outcome: str, transaction_id: int = -1) -> four_writers.RecordedOutcome:
    row_content = content(key)
    return four_writers.RecordedOutcome(
        key, 0, four_writers.digest_of(row_content.to_bytes()), 1.0, 2.0, outcome, transaction_id
    )


def content(key: str) -> four_writers.Content:
    return four_writers.Content(key, 0, -1, [], [], [])


def entry(key: str, transaction_id: int) -> four_writers.Entry:
    return four_writers.Entry(0, transaction_id, key.encode(), content(key).to_bytes())


@pytest.mark.parametrize(
    ("ledger", "log", "wrong"),
    [
        ([recorded("a", "committed", 0)], [], "is not in the log"),
        ([recorded("a", "rejected")], [entry("a", 0)], "was reported as rejected"),
        ([recorded("a", "lost")], [entry("a", 0)], "was reported as lost"),
        ([recorded("a", "committed", 1)], [entry("a", 0)], "was reported as transaction 1"),
        ([recorded("a", "unknown")], [entry("a", 0), entry("a", 1)], "is in the log 2 times"),
        ([], [entry("a", 0)], "no process has written this key"),
        ([recorded("a", "committed", 1)], [entry("a", 1)], "expected transaction ID 0, found 1"),
    ],
)
def test_the_comparison_detects_a_wrong_history(ledger, log, wrong):
    assert any(wrong in problem for problem in four_writers.compare(ledger, log).wrong)


def test_the_comparison_detects_a_committed_conflict():
    rows = [four_writers.Content(key, 0, -1, [7], [], []) for key in ("a", "b")]
    log = [
        four_writers.Entry(0, number, row.key.encode(), row.to_bytes())
        for number, row in enumerate(rows)
    ]
    ledger = [
        four_writers.RecordedOutcome(
            row.key, 0, four_writers.digest_of(row.to_bytes()), 1.0, 2.0, "committed", number
        )
        for number, row in enumerate(rows)
    ]
    assert any(
        "conflicts with transaction 0" in problem
        for problem in four_writers.compare(ledger, log).wrong
    )


def test_the_comparison_accepts_a_correct_history():
    ledger = [recorded("a", "committed", 0), recorded("b", "rejected"), recorded("c", "unknown")]
    assert four_writers.compare(ledger, [entry("a", 0)]).wrong == []
