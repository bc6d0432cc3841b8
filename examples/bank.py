"""A bank on a log: accounts, deposits, withdrawals, transfers, at a terminal.

    python examples/bank.py                              a prompt; `help` lists the commands
    python examples/bank.py open 7                       one command
    python examples/bank.py deposit 7 100 --id invoice-12    repeated, it is done once
    python examples/bank.py accounts --connect zk1:2181/waltz/bank \\
        --database postgresql+psycopg://user@host/bank

Without --connect, a small cluster runs during the command, and keeps its data in --directory.
Without --database, the database is an SQLite file in --directory. Several processes may use one
cluster and one database concurrently. `bank_books.py` explains the rules.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import NamedTuple

try:
    from bank_books import engine_of
    from bank_desk import Bank, BankError, money
    from sqlalchemy.exc import DBAPIError, SQLAlchemyError
except ImportError as error:
    raise SystemExit(f"bank: {error}") from None

from waltz_core.errors import BadConfig, OutcomeUnknown, WaltzError
from waltz_core.local import running_cluster

DIRECTORY = Path(".waltz/bank")


class Command(NamedTuple):
    """A command of the prompt: its arguments, its help text, and its function."""

    arguments: str
    about: str
    run: Callable[["Terminal", list[str]], None]
    is_write: bool = True


class Terminal:
    """Runs the commands of the bank, and prints their results."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.key: str | None = None

    def run(self, words: Sequence[str], key: str | None = None) -> None:
        """Run a command; raise BankError if the command or its arguments are invalid."""
        name, *rest = words
        command = COMMANDS.get(name)
        if command is None:
            raise BankError(f"unknown command {name!r}; `help` lists the commands")
        if len(rest) != len(command.arguments.split()):
            raise BankError(f"expected: {name} {command.arguments}".rstrip())
        if key is not None and not command.is_write:
            raise BankError(f"{name} changes nothing, so it takes no --id")
        self.key = key
        command.run(self, rest)

    # -- commands

    def open(self, words: list[str]) -> None:
        """Open the account words[0]."""
        account = account_of(words[0])
        self.bank.open(account, key=self.key)
        show_line(f"account {account} is open")

    def deposit(self, words: list[str]) -> None:
        """Deposit the amount words[1] into the account words[0]."""
        account = account_of(words[0])
        self.bank.deposit(account, cents_of(words[1]), key=self.key)
        self._print_balance(account)

    def withdraw(self, words: list[str]) -> None:
        """Withdraw the amount words[1] from the account words[0]."""
        account = account_of(words[0])
        self.bank.withdraw(account, cents_of(words[1]), key=self.key)
        self._print_balance(account)

    def transfer(self, words: list[str]) -> None:
        """Move the amount words[2] from the account words[0] to the account words[1]."""
        source, target = account_of(words[0]), account_of(words[1])
        self.bank.transfer(source, target, cents_of(words[2]), key=self.key)
        self._print_balance(source)
        self._print_balance(target)

    def deactivate(self, words: list[str]) -> None:
        """Close the account words[0] permanently."""
        account = account_of(words[0])
        self.bank.deactivate(account, key=self.key)
        show_line(f"account {account} is deactivated")

    def balance(self, words: list[str]) -> None:
        """Print the balance of the account words[0]."""
        self._print_balance(account_of(words[0]))

    def accounts(self, _: list[str]) -> None:
        """Print all accounts with their balances, the amount in transit, and the total."""
        rows = self.bank.accounts()
        if not rows:
            show_line("there are no accounts yet; `open 1` opens one")
            return
        show_line(f"{'account':>12}  {'balance':>20}")
        for account, cents, is_active in rows:
            show_line(f"{account:>12}  {money(cents):>20}{'' if is_active else '  deactivated'}")
        in_transit = self.bank.cents_in_transit()
        if in_transit:
            show_line(f"{'in transit':>12}  {money(in_transit):>20}")
        show_line(f"{'total':>12}  {money(in_transit + sum(cents for _, cents, _ in rows)):>20}")

    def history(self, words: list[str]) -> None:
        """Print the entries of the account words[0], in the order of the log."""
        show_line(f"{'transaction':>12}  {'':<10}  {'amount':>20}")
        for partition, transaction, kind, cents, other in self.bank.history(account_of(words[0])):
            amount = money(cents) if cents else ""
            side = "" if other is None else f"  {'from' if cents > 0 else 'to'} {other}"
            show_line(
                f"{f'{partition}/{transaction}':>12}  {kind:<10}  {amount:>20}{side}".rstrip()
            )

    def settle(self, _: list[str]) -> None:
        """Complete the transfers in transit, which a terminated process did not complete."""
        count = self.bank.settle_all()
        show_line(f"{count} transfers were in transit" if count else "nothing was in transit")

    def help(self, _: list[str]) -> None:
        """Print the list of commands."""
        print_commands()

    def _print_balance(self, account: int) -> None:
        show_line(f"account {account} holds {money(self.bank.balance(account))}")


COMMANDS = {
    "open": Command("ACCOUNT", "open an account; its number is any whole number", Terminal.open),
    "deposit": Command(
        "ACCOUNT AMOUNT", "deposit an amount, such as 100 or 12.50", Terminal.deposit
    ),
    "withdraw": Command(
        "ACCOUNT AMOUNT", "withdraw an amount, up to the balance", Terminal.withdraw
    ),
    "transfer": Command("SOURCE TARGET AMOUNT", "move money between accounts", Terminal.transfer),
    "deactivate": Command("ACCOUNT", "close an empty account permanently", Terminal.deactivate),
    "balance": Command(
        "ACCOUNT", "show the balance of an account", Terminal.balance, is_write=False
    ),
    "accounts": Command("", "show the balances of all accounts", Terminal.accounts, is_write=False),
    "history": Command(
        "ACCOUNT", "show the entries of an account", Terminal.history, is_write=False
    ),
    "settle": Command(
        "", "complete transfers that were interrupted", Terminal.settle, is_write=False
    ),
    "help": Command("", "show this list", Terminal.help, is_write=False),
}


def print_commands() -> None:
    """Print all commands with their arguments and help texts."""
    for name, command in COMMANDS.items():
        show_line(f"  {f'{name} {command.arguments}':<34} {command.about}")
    show_line(f"  {'quit':<34} leave; so does ctrl-D")


def account_of(word: str) -> int:
    """Parse the number of an account; raise BankError if it is invalid."""
    if not re.fullmatch(r"[0-9]{1,18}", word):
        raise BankError(f"expected the number of an account, found {word!r}")
    return int(word)


def cents_of(word: str) -> int:
    """Convert an amount such as 12.50 to cents; raise BankError if the amount is invalid."""
    try:
        cents = Decimal(word.replace(",", "")) * 100
        is_whole = cents == cents.to_integral_value()
    except InvalidOperation:
        is_whole, cents = False, Decimal(0)
    if not is_whole or not re.fullmatch(r"[0-9.,]{1,30}", word):
        raise BankError(f"expected an amount such as 100 or 12.50, found {word!r}")
    return int(cents)


def show_line(text: str) -> None:
    """Print a line to standard output, and flush it."""
    print(text, flush=True)


def sentence_of(error: Exception) -> str:
    """Return the one-line message that the terminal prints for an error."""
    if isinstance(error, BankError):
        return f"no: {error}"
    if isinstance(error, OutcomeUnknown):
        return (
            f"the outcome is unknown ({error}). Hint: `history` shows whether the command was "
            "carried out; with --id, you can repeat it safely."
        )
    if isinstance(error, DBAPIError):
        return f"database error: {' '.join(str(error.orig).split())}"
    return str(error).partition("\n")[0]


def run_and_print_error(terminal: Terminal, words: Sequence[str], key: str | None = None) -> bool:
    """Run a command; if it fails, print a one-line message and return False."""
    try:
        terminal.run(words, key)
    except (BankError, WaltzError, SQLAlchemyError) as error:
        print(sentence_of(error), file=sys.stderr, flush=True)
        return False
    return True


def run_prompt(terminal: Terminal) -> None:
    """Read commands from standard input and run them, until `quit` or the end of the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - arrow keys at the prompt, if it exists
    show_line("the bank is open; `help` lists the commands")
    while True:
        try:
            words = input("bank> " if sys.stdin.isatty() else "").split()
        except (EOFError, KeyboardInterrupt):
            break
        if words and words[0] in ("quit", "exit"):
            break
        if words:
            run_and_print_error(terminal, words)
    show_line("good-bye")


@contextlib.contextmanager
def open_terminal(options: argparse.Namespace) -> Iterator[Terminal]:
    """Open the bank on the cluster and the database of the command line; yield its terminal."""
    with contextlib.ExitStack() as stack:
        directory: Path = options.directory
        directory.mkdir(parents=True, exist_ok=True)
        connect = options.connect
        if connect is None:
            print(f"a small cluster starts in {directory}", file=sys.stderr, flush=True)
            connect = stack.enter_context(running_cluster(directory / "cluster")).connect
        engine = engine_of(options.database or f"sqlite:///{directory / 'bank.db'}")
        stack.callback(engine.dispose)
        bank = Bank(connect, engine)
        stack.callback(bank.close)
        yield Terminal(bank)


def main() -> int:
    """Run the program; return the exit code: 1 if a command failed."""
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "command", nargs="*", help="the command to run [default: prompt for commands]"
    )
    parser.add_argument("--connect", help="a running cluster")
    parser.add_argument("--database", help="SQLAlchemy's URL of the database")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help=f"default {DIRECTORY}")
    parser.add_argument(
        "--id",
        help="a name for this command; commands with the same name are carried out only once",
    )
    options = parser.parse_intermixed_args()
    if options.connect is not None and options.database is None:
        parser.error("--connect needs --database: each log has a database of its own")
    if options.command == ["help"]:  # needs no bank
        print_commands()
        return 0
    try:
        with open_terminal(options) as terminal:
            if options.command:
                return 0 if run_and_print_error(terminal, options.command, options.id) else 1
            run_prompt(terminal)
    except (BadConfig, WaltzError, SQLAlchemyError, ImportError) as error:
        print(f"bank: {sentence_of(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
