"""The bank example while tellers, servers and storages are killed."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest

from tests.fault import bank_teller
from tests.fault.bank_teller import (
    ACCOUNT_COUNT,
    COMMITTED,
    REJECTED,
    bank_books,
    bank_desk,
    create_engine,
)
from tests.fault.child import ChildProcess
from tests.fault.load import PROJECT_ROOT, Scenario, four_writers, wait_until
from tests.time_limits import TEST_TIMEOUT_S

pytestmark = pytest.mark.fault

TELLER_COUNT = 3
Run = Callable[..., "subprocess.CompletedProcess[str]"]
# Accounts of the tests at a terminal, which share a log. The log has four partitions.
FIRST = {"sqlite": 100, "postgresql": 200}
KILLED_ORDER = ("teller", "server-1", "teller", "storage-2", "teller")


class Process(ChildProcess):
    """A teller in a separate process."""

    def __init__(self, connect: str, database: str, journal: Path) -> None:
        self.journal = journal
        self._command = [sys.executable, str(PROJECT_ROOT / "tests" / "fault" / "bank_teller.py")]
        self._command += ["--connect", connect, "--database", database]
        self._command += ["--journal", str(journal), "--name", journal.stem]
        self.start()

    def start(self) -> None:
        self.run(self._command)

    def await_commits(self) -> None:
        """Wait until the teller has completed three more commands."""
        wanted = self._committed_count() + 3
        wait_until(f"{self.journal.stem} continues", lambda: self._committed_count() >= wanted)

    def _committed_count(self) -> int:
        assert self.process.poll() is None, f"{self.journal.stem} has ended"
        lines = bank_teller.read_journal(self.journal)
        return sum(line.get("outcome") == COMMITTED for line in lines)


@pytest.fixture
def tellers(scenario: Scenario, database: str, tmp_path: Path) -> Iterator[list[Process]]:
    connect = scenario.cluster.connect
    engine = create_engine(database)
    bank = bank_desk.Bank(connect, engine)
    for account in range(1, ACCOUNT_COUNT + 1):
        with suppress(
            bank_desk.BankError
        ):  # another test may have created the accounts in this log
            bank.open(account)
            bank.deposit(account, 10_000)
    bank.close()
    engine.dispose()
    # The teller's name is in its keys, so it must differ from the names in other tests.
    names = [f"{tmp_path.name}-{number}" for number in range(TELLER_COUNT)]
    started = [Process(connect, database, tmp_path / f"{name}.journal") for name in names]
    yield started
    for each in started:
        each.kill()


@pytest.mark.slow
def test_the_balances_are_correct_after_each_process_has_been_killed(
    scenario: Scenario, database: str, tellers: list[Process]
) -> None:
    for teller in tellers:
        teller.await_commits()
    for number, name in enumerate(KILLED_ORDER):
        victim = tellers[number % TELLER_COUNT]
        if name == "teller":
            victim.kill()
            victim.start()
        else:
            scenario.cluster.kill(name)
            victim.await_commits()
            scenario.cluster.start(name)
        victim.await_commits()
    for teller in tellers:
        teller.end()
    journaled = [line for teller in tellers for line in bank_teller.read_journal(teller.journal)]
    assert any("repeated" in line for line in journaled), "no teller was killed during a command"
    engine = create_engine(database)
    bank = bank_desk.Bank(scenario.cluster.connect, engine)
    bank.settle_all()
    ledger = Ledger(scenario.cluster.connect)
    ledger.check_whole()
    ledger.check_outcomes(journaled)
    assert bank.cents_in_transit() == 0
    books = {account: (cents, is_active) for account, cents, is_active in bank.accounts()}
    assert books == ledger.accounts
    assert sum(cents for cents, _ in books.values()) == ledger.brought_in
    assert all(
        sum(movement[3] for movement in bank.history(account)) == cents
        for account, (cents, _) in books.items()
    )
    bank.close()
    engine.dispose()


class Ledger:
    """A replay of the log, with an independent implementation of the rules."""

    def __init__(self, connect: str) -> None:
        self.accounts: dict[int, tuple[int, bool]] = {}
        self.brought_in = 0
        self.kinds: dict[str, str] = {}
        for entry in four_writers.read_log(connect):
            self._apply_entry(bank_books.Entry(*msgpack.unpackb(entry.data)))

    def _apply_entry(self, entry: bank_books.Entry) -> None:
        assert entry.key not in self.kinds, f"{entry} is in the log twice"
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
        """Check that each transfer between partitions is complete."""
        for key, kind in self.kinds.items():
            if kind == "send":
                end = self.kinds.get(f"{key}/end")
                assert end in ("arrive", "reject"), f"{key} is not complete"
                assert (f"{key}/back" in self.kinds) == (end == "reject")
        counts = Counter(self.kinds.values())
        assert {"open", "deposit", "withdraw", "transfer", "send", "arrive"} <= set(counts)

    def check_outcomes(self, journaled: list[dict[str, str]]) -> None:
        """Check that the log has all commands reported as done, and none reported as refused."""
        for line in journaled:
            key = line["key"]
            if line.get("outcome") == COMMITTED:
                assert key in self.kinds, f"{key} was reported as done and is lost"
            elif line.get("outcome") == REJECTED and key in self.kinds:
                assert self.kinds.get(f"{key}/end") == "reject", f"{key} was reported as refused"


# --- at a terminal


@pytest.fixture
def first_account(database: str) -> int:
    return FIRST[database.partition("+")[0].partition(":")[0]]


@pytest.fixture
def bank_commands(scenario: Scenario, database: str) -> Run:
    def run(*words: str, lines: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(PROJECT_ROOT / "examples" / "bank.py"), *words]
        return subprocess.run(
            [*command, "--connect", scenario.cluster.connect, "--database", database],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            check=False,
            timeout=TEST_TIMEOUT_S,
        )

    return run


@pytest.fixture
def bank(scenario: Scenario, database: str) -> Iterator[bank_desk.Bank]:
    engine = create_engine(database)
    new_bank = bank_desk.Bank(scenario.cluster.connect, engine)
    yield new_bank
    new_bank.close()
    engine.dispose()


@pytest.mark.slow
def test_the_bank_accepts_commands_at_its_prompt_and_as_arguments(
    bank_commands: Run, first_account: int
) -> None:
    one, two = first_account, first_account + 1
    lines = (
        *(f"open {one}", f"open {two}", f"deposit {one} 100", f"transfer {one} {two} 12.50"),
        *(f"withdraw {one} 87.51", f"deposit {two} -1", "fly", f"deposit {two}"),
        *(f"deactivate {one}", f"withdraw {one} 87.50", f"deactivate {one}", f"deposit {one} 1"),
        *("accounts", f"history {two}", "help", "quit"),
    )
    result = bank_commands(lines=lines)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [
        f"no: account {one} holds 87.50, which is less than 87.51",
        "no: expected an amount such as 100 or 12.50, found '-1'",
        "no: unknown command 'fly'; `help` lists the commands",
        "no: expected: deposit ACCOUNT AMOUNT",
        f"no: account {one} holds 87.50; it must be empty",
        f"no: account {one} is deactivated",
    ]
    printed = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (f"{one} 0.00 deactivated", f"{two} 12.50", f"account {one} is deactivated"):
        assert line in printed
    assert any(line.endswith(f"12.50 from {one}") for line in printed)
    for _ in range(2):  # a repeated command takes effect once
        result = bank_commands("deposit", str(two), "1", "--id", f"gift-{two}")
        assert (result.returncode, result.stdout) == (0, f"account {two} holds 13.50\n")
    result = bank_commands("withdraw", str(two), "1,000")
    assert (result.returncode, result.stdout) == (1, "")


class BankKilled(Exception):
    """A desk has died."""


class InterruptedBank(bank_desk.Bank):
    """A desk that dies in the middle of a transfer."""

    def _complete_transfer(self, key: str) -> None:
        raise BankKilled(key)


def in_two_partitions(bank: bank_desk.Bank, first_account: int) -> tuple[int, int]:
    """Return two accounts in different partitions, which no single entry can change."""
    first = first_account
    second = next(
        number
        for number in range(first_account + 1, first_account + 50)
        if bank.partition_of_account(number) != bank.partition_of_account(first)
    )
    return first, second


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_restarted_bank_settles_the_transfers_that_were_in_transit(
    scenario: Scenario, database: str, first_account: int, bank: bank_desk.Bank, is_closed: bool
) -> None:
    one, two = in_two_partitions(bank, first_account + (300 if is_closed else 350))
    for account in (one, two):
        bank.open(account)
    bank.deposit(one, 500)
    engine = create_engine(database)
    dying = InterruptedBank(scenario.cluster.connect, engine)
    with pytest.raises(BankKilled):
        dying.transfer(one, two, 200)
    dying.close()
    engine.dispose()
    bank.catch_up()  # all partitions: the log has transfers of other tests
    assert (bank.balance(one), bank.balance(two), bank.cents_in_transit()) == (300, 0, 200)
    bank.withdraw(one, 300)
    with pytest.raises(bank_desk.BankError, match="is in transit"):
        bank.deactivate(one)
    if is_closed:
        bank.deactivate(two)
    assert bank.settle_all() == 1
    balances = (200, 0) if is_closed else (0, 200)
    assert (bank.balance(one), bank.balance(two), bank.cents_in_transit()) == (*balances, 0)
    assert bank.settle_all() == 0
    if is_closed:
        bank.withdraw(one, 200)
    bank.deactivate(one)


@pytest.mark.slow
def test_the_bank_starts_a_cluster_if_none_is_given_and_keeps_its_accounts(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(PROJECT_ROOT / "examples" / "bank.py"),
        "--directory",
        str(tmp_path),
    ]
    for words, output in ((["open", "7"], "account 7 is open"), (["balance", "7"], "holds 0.00")):
        result = subprocess.run(
            [*command, *words], capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT_S
        )
        assert result.returncode == 0, result.stderr
        assert output in result.stdout
