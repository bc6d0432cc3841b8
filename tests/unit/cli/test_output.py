"""Tables and progress: color and a bar on a terminal, plain text or nothing otherwise."""

import asyncio
import io
import sys

import pytest

from waltz_core.cli import progress
from waltz_core.cli.client.client_command import _print_transaction
from waltz_core.cli.output import print_table, to_one_line
from waltz_core.cli.progress import ProgressLine

TABLE = (("partition", "state"), [(0, "ok"), (12, "FAILED"), (3, "[red]?")])


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_table_for_a_program_is_plain_text(capsys):
    print_table(*TABLE)
    assert capsys.readouterr().out == (
        "partition  state\n        0  ok\n       12  FAILED\n        3  [red]?\n"
    )


def test_a_table_on_a_terminal_has_states_in_color(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    print_table(*TABLE)
    screen = terminal.getvalue()
    assert "\x1b[32mok" in screen
    assert "\x1b[31mFAILED" in screen
    assert "[red]?" in screen


def test_no_color_is_used_where_it_is_disabled(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    print_table(*TABLE)
    assert "FAILED" in terminal.getvalue()
    assert "\x1b[3" not in terminal.getvalue()


@pytest.mark.parametrize("first_shown_s", [0.0, 60.0])
def test_progress_appears_on_a_terminal_after_a_while_and_is_removed(
    terminal, monkeypatch, first_shown_s
):
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "SHOW_AFTER_S", first_shown_s)

    async def work():
        with ProgressLine() as line:
            line.show(1, 4, "waiting for a storage")
            for _ in range(10):  # let the loop run the timers that are due
                await asyncio.sleep(0)
        return line.wait_reason

    assert asyncio.run(work()) == "a storage"
    screen = terminal.getvalue()
    assert ("1 of 4 waiting for a storage" in screen) == (not first_shown_s)
    assert not screen or screen.endswith("\x1b[2K")


@pytest.mark.parametrize("first_shown_s", [0.0, 60.0])
def test_a_command_without_an_event_loop_draws_progress_when_it_reports(
    terminal, monkeypatch, first_shown_s
):
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "SHOW_AFTER_S", first_shown_s)
    with ProgressLine() as line:
        line.show(1, 4, "transactions applied")
        line.show(2, 4, "transactions applied")
    screen = terminal.getvalue()
    assert ("2 of 4 transactions applied" in screen) == (not first_shown_s)
    assert not screen or screen.endswith("\x1b[2K")


def test_no_progress_is_written_to_a_file(capsys):
    async def work():
        with ProgressLine() as line:
            line.show(1, 4, "waiting")

    asyncio.run(work())
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("Zoë ✓ a\\b".encode(), "Zoë ✓ a\\b"),
        (b"\x1b[2J\x07\x7f", r"\x1b[2J\x07\x7f"),
        (b"a\tb\r\n7\t0\tforged", r"a\tb\r\n7\t0\tforged"),
        ("\x9b31m\u202e".encode(), r"\x9b31m\u202e"),
        (b"\xff\x00", r"\xff\x00"),
    ],
)
def test_data_is_printed_in_one_line_without_control_characters(data, expected, capsys):
    assert to_one_line(data) == expected
    _print_transaction(7, 1, data, as_json=False)
    assert capsys.readouterr().out == f"7\t1\t{expected}\n"
