"""The bank while its tellers, servers and storages are killed: nothing is lost, nothing doubled."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest

from tests.fault import bank_teller
from tests.fault.bank_teller import ACCOUNT_COUNT, DONE, REFUSED, bank_books, bank_desk, engine_of
from tests.fault.child import Child
from tests.fault.load import ROOT, Story, four_writers, wait_until

pytestmark = pytest.mark.fault

TELLER_COUNT = 3
KILLED_ORDER = ("teller", "server-1", "teller", "storage-2", "teller")


class Process(Child):
    """A teller in a process of its own."""

    def __init__(self, connect: str, database: str, journal: Path) -> None:
        self.journal = journal
        self._command = [sys.executable, str(ROOT / "tests" / "fault" / "bank_teller.py")]
        self._command += ["--connect", connect, "--database", database]
        self._command += ["--journal", str(journal), "--name", journal.stem]
        self.start()

    def start(self) -> None:
        self.run(self._command)

    def await_commits(self) -> None:
        """Wait until it has done some more."""
        wanted = self._done() + 3
        wait_until(f"{self.journal.stem} continues", lambda: self._done() >= wanted)

    def _done(self) -> int:
        assert self.process.poll() is None, f"{self.journal.stem} has ended"
        lines = bank_teller.read(self.journal)
        return sum(line.get("outcome") == DONE for line in lines)


@pytest.fixture
def tellers(story: Story, database: str, tmp_path: Path) -> Iterator[list[Process]]:
    connect = story.cluster.connect
    engine = engine_of(database)
    bank = bank_desk.Bank(connect, engine)
    for account in range(1, ACCOUNT_COUNT + 1):
        with suppress(bank_desk.Refused):  # the log may be another test's as well
            bank.open(account)
            bank.deposit(account, 10_000)
    bank.close()
    engine.dispose()
    # Its name is in its keys, which no other test's may have.
    names = [f"{tmp_path.name}-{number}" for number in range(TELLER_COUNT)]
    started = [Process(connect, database, tmp_path / f"{name}.journal") for name in names]
    yield started
    for each in started:
        each.kill()


def test_the_sums_are_right_whichever_process_is_killed(
    story: Story, database: str, tellers: list[Process]
) -> None:
    for each in tellers:
        each.await_commits()
    for number, name in enumerate(KILLED_ORDER):
        victim = tellers[number % TELLER_COUNT]
        if name == "teller":
            victim.kill()
            victim.start()
        else:
            story.cluster.kill(name)
            victim.await_commits()
            story.cluster.start(name)
        victim.await_commits()
    for each in tellers:
        each.end()
    journaled = [line for each in tellers for line in bank_teller.read(each.journal)]
    assert any("repeated" in line for line in journaled), "no teller was killed in the middle"
    engine = engine_of(database)
    bank = bank_desk.Bank(story.cluster.connect, engine)
    bank.settle_all()
    ledger = Ledger(story.cluster.connect)
    ledger.check_whole()
    ledger.check_outcomes(journaled)
    assert bank.cents_under_way() == 0
    books = {account: (cents, is_active) for account, cents, is_active in bank.accounts()}
    assert books == ledger.accounts
    assert sum(cents for cents, _ in books.values()) == ledger.brought_in
    assert all(
        sum(each[3] for each in bank.history(account)) == cents
        for account, (cents, _) in books.items()
    )
    bank.close()
    engine.dispose()


class Ledger:
    """The log played again, by rules of its own."""

    def __init__(self, connect: str) -> None:
        self.accounts: dict[int, tuple[int, bool]] = {}
        self.brought_in = 0
        self.kinds: dict[str, str] = {}
        for entry in four_writers.read_log(connect):
            self._play(bank_books.Entry(*msgpack.unpackb(entry.data)))

    def _play(self, entry: bank_books.Entry) -> None:
        assert entry.key not in self.kinds, f"{entry} stands twice"
        self.kinds[entry.key] = entry.kind
        if entry.kind == "open":
            assert entry.account not in self.accounts
            self.accounts[entry.account] = (0, True)
        sign = {"deposit": 1, "withdraw": -1}.get(entry.kind, 0)
        self.brought_in += sign * entry.cents
        for account, cents, _ in entry.effects():
            held, is_active = self.accounts[account]
            assert is_active or entry.kind == "reject", f"{entry} changes a deactivated account"
            assert held + cents >= 0, f"{entry} takes more than {held}"
            self.accounts[account] = (held + cents, is_active)
        if entry.kind == "deactivate":
            assert self.accounts[entry.account] == (0, True)
            self.accounts[entry.account] = (0, False)

    def check_whole(self) -> None:
        """Each transfer between partitions has come to its end."""
        for key, kind in self.kinds.items():
            if kind == "send":
                end = self.kinds.get(f"{key}/end")
                assert end in ("arrive", "reject"), f"{key} stays under way"
                assert (f"{key}/back" in self.kinds) == (end == "reject")
        counts = Counter(self.kinds.values())
        assert {"open", "deposit", "withdraw", "transfer", "send", "arrive"} <= set(counts)

    def check_outcomes(self, journaled: list[dict[str, str]]) -> None:
        """What was reported as done is there, what was reported as refused is not."""
        for line in journaled:
            key = line["key"]
            if line.get("outcome") == DONE:
                assert key in self.kinds, f"{key} was reported as done and is lost"
            elif line.get("outcome") == REFUSED and key in self.kinds:
                assert self.kinds.get(f"{key}/end") == "reject", f"{key} was reported as refused"
