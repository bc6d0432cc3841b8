"""The bank at a terminal, and transfers that another process has left half done."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.bank_teller import bank_desk, engine_of
from tests.fault.load import ROOT
from tests.patience import HANG_S

pytestmark = pytest.mark.fault

Run = Callable[..., "subprocess.CompletedProcess[str]"]
# The tests share a log, so each has accounts of its own. The log has four partitions.
FIRST = {"sqlite": 100, "postgresql": 200}


@pytest.fixture
def first(database: str) -> int:
    return FIRST[database.partition("+")[0].partition(":")[0]]


@pytest.fixture
def typed(waltz_cluster: str, database: str) -> Run:
    def run(*words: str, lines: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(ROOT / "examples" / "bank.py"), *words]
        return subprocess.run(
            [*command, "--connect", waltz_cluster, "--database", database],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
        )

    return run


@pytest.fixture
def bank(waltz_cluster: str, database: str) -> Iterator[bank_desk.Bank]:
    engine = engine_of(database)
    made = bank_desk.Bank(waltz_cluster, engine)
    yield made
    made.close()
    engine.dispose()


def test_a_prompt_and_single_commands(typed: Run, first: int) -> None:
    one, two = first, first + 1
    lines = (
        *(f"open {one}", f"open {two}", f"deposit {one} 100", f"transfer {one} {two} 12.50"),
        *(f"withdraw {one} 87.51", f"deposit {two} -1", "fly", f"deposit {two}"),
        *(f"deactivate {one}", f"withdraw {one} 87.50", f"deactivate {one}", f"deposit {one} 1"),
        *("accounts", f"history {two}", "help", "quit"),
    )
    done = typed(lines=lines)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"no: account {one} holds 87.50, which is less than 87.51",
        "no: expected an amount such as 100 or 12.50, found '-1'",
        "no: there is no command 'fly'; `help` lists all",
        "no: expected: deposit ACCOUNT AMOUNT",
        f"no: account {one} holds 87.50; it must be empty",
        f"no: account {one} is deactivated",
    ]
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in (f"{one} 0.00 deactivated", f"{two} 12.50", f"account {one} is deactivated"):
        assert line in printed
    assert any(line.endswith(f"12.50 from {one}") for line in printed)
    for _ in range(2):  # given again it is done once
        done = typed("deposit", str(two), "1", "--id", f"gift-{two}")
        assert (done.returncode, done.stdout) == (0, f"account {two} holds 13.50\n")
    done = typed("withdraw", str(two), "1,000")
    assert (done.returncode, done.stdout) == (1, "")


class Dead(Exception):
    """A desk has died."""


class DyingBank(bank_desk.Bank):
    """A desk that dies in the middle of a transfer."""

    def _settle(self, key: str) -> None:
        raise Dead(key)


def in_two_partitions(bank: bank_desk.Bank, first: int) -> tuple[int, int]:
    """Return two accounts that no one entry can change together."""
    one = first
    two = next(each for each in range(first + 1, first + 50) if bank.home(each) != bank.home(one))
    return one, two


@pytest.mark.parametrize("is_closed", [False, True])
def test_the_next_one_ends_what_was_left_half_done(
    waltz_cluster: str, database: str, first: int, bank: bank_desk.Bank, is_closed: bool
) -> None:
    one, two = in_two_partitions(bank, first + (300 if is_closed else 350))
    for account in (one, two):
        bank.open(account)
    bank.deposit(one, 500)
    engine = engine_of(database)
    dying = DyingBank(waltz_cluster, engine)
    with pytest.raises(Dead):
        dying.transfer(one, two, 200)
    dying.close()
    engine.dispose()
    assert (bank.balance(one), bank.balance(two), bank.cents_under_way()) == (300, 0, 200)
    bank.withdraw(one, 300)
    with pytest.raises(bank_desk.Refused, match="is in transit"):
        bank.deactivate(one)
    if is_closed:
        bank.deactivate(two)
    assert bank.settle_all() == 1
    balances = (200, 0) if is_closed else (0, 200)
    assert (bank.balance(one), bank.balance(two), bank.cents_under_way()) == (*balances, 0)
    assert bank.settle_all() == 0
    if is_closed:
        bank.withdraw(one, 200)
    bank.deactivate(one)


def test_without_a_cluster_it_starts_one_and_keeps_it(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "bank.py"), "--directory", str(tmp_path)]
    for words, said in ((["open", "7"], "account 7 is open"), (["balance", "7"], "holds 0.00")):
        done = subprocess.run(
            [*command, *words], capture_output=True, text=True, check=False, timeout=HANG_S
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
