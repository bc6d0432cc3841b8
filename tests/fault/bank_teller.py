"""One of several teller processes of the bank, which `test_bank.py` starts and kills.

The teller executes random commands one after the other until its input ends. It journals each
command twice: before the command starts, and when the outcome is reported. So a restarted teller
knows the unfinished command, and repeats this command with the same key. The teller also repeats
commands that fail with a temporary error.
"""

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import sqlalchemy as sa

from waltz_core.errors import WaltzError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import bank_books
import bank_desk

ACCOUNT_COUNT, ACCOUNTS_MAX = 12, 20
COMMAND_KINDS = (
    "deposit",
    "withdraw",
    "transfer",
    "transfer",
    "transfer",
    "transfer",
    "empty",
    "open",
)
COMMITTED, REJECTED, RETRIED = "done", "refused", "again"


def create_engine(url: str) -> sa.Engine:
    """Return an engine without a pool, so that a client that ends leaves no connection behind."""
    options: dict[str, Any] = {"connect_args": {"timeout": 30}} if "sqlite" in url else {}
    return sa.create_engine(url, poolclass=sa.pool.NullPool, **options)


def read_journal(journal: Path) -> list[dict[str, Any]]:
    """Return the journal of a teller, without a line that a kill has truncated."""
    if not journal.exists():
        return []
    lines = journal.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


class Teller:
    """Executes commands and journals them."""

    def __init__(self, bank: bank_desk.Bank, journal: Path, name: str) -> None:
        self._bank = bank
        self._name = f"{name}.{os.getpid()}"
        self._random = Random(self._name)
        self._command_count = 0
        self._journal = journal.open("a", encoding="utf-8", buffering=1)
        self.is_stopping = threading.Event()

    def random_command(self) -> dict[str, Any]:
        """Draw a random command."""
        self._command_count += 1
        key, kind = f"{self._name}.{self._command_count}", self._random.choice(COMMAND_KINDS)
        account, other = self._random.sample(range(1, ACCOUNTS_MAX + 1), 2)
        cents = self._random.randrange(1, 2_000)
        words: tuple[int, ...] = {"open": (account,), "empty": (account,)}.get(
            kind, (account, other, cents) if kind == "transfer" else (account, cents)
        )
        return {"key": key, "kind": kind, "words": words}

    def run(self, command: dict[str, Any]) -> None:
        """Repeat a command until it has a final outcome."""
        key, kind, words = command["key"], command["kind"], command["words"]
        while not self.is_stopping.is_set():
            try:
                if kind == "empty":
                    self._close_account(words[0], key)
                else:
                    getattr(self._bank, kind)(*words, key=key)
            except bank_desk.BankError as error:
                self.write_line({"key": key, "outcome": REJECTED, "why": str(error)})
                return
            except WaltzError:
                continue
            self.write_line({"key": key, "outcome": COMMITTED})
            return

    def write_line(self, line: dict[str, Any]) -> None:
        """Journal a line; it survives a kill of this process."""
        self._journal.write(json.dumps(line) + "\n")

    def _close_account(self, account: int, key: str) -> None:
        """Close an account to which transfers may be in flight."""
        if account <= ACCOUNT_COUNT // 2:
            raise bank_desk.BankError("some stay open")
        cents = self._bank.balance(account)
        if cents:
            self._bank.withdraw(account, cents, key=f"{key}.all")
        self._bank.deactivate(account, key=key)


def main() -> None:
    """Run a teller."""
    parser = argparse.ArgumentParser()
    for word in ("--connect", "--database", "--journal", "--name"):
        parser.add_argument(word, required=True)
    options = parser.parse_args()
    journal = Path(options.journal)
    earlier_lines = read_journal(journal)
    bank = bank_desk.Bank(options.connect, bank_books.engine_of(options.database))
    teller = Teller(bank, journal, options.name)

    def wait_for_end_of_input() -> None:
        sys.stdin.read()
        teller.is_stopping.set()

    threading.Thread(target=wait_for_end_of_input, daemon=True).start()
    answered = {line["key"] for line in earlier_lines if "outcome" in line}
    for command in [
        line for line in earlier_lines if "kind" in line and line["key"] not in answered
    ]:
        teller.write_line({"key": command["key"], "repeated": True})
        teller.run(command)
    while not teller.is_stopping.is_set():
        command = teller.random_command()
        teller.write_line(command)
        teller.run(command)
    bank.close()


if __name__ == "__main__":
    main()
