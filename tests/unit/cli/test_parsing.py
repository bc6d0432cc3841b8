"""Arguments that cannot be parsed: one error, its position, and the nearest valid word."""

import pytest

from waltz_core.cli import subcommands
from waltz_core.cli.main import EXIT_INTERRUPTED, main
from waltz_core.cli.subcommands import EXIT_USAGE_ERROR


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("clinet", "waltz-core: unknown command 'clinet'; did you mean 'client'?"),
        ("client apend", "waltz-core client: unknown command 'apend'; did you mean 'append'?"),
        (
            "access token creat",
            "core access token: unknown command 'creat'; did you mean 'create'?",
        ),
        (
            "config show foo",
            "unknown value 'foo'; expected one of client, gateway, local, server, storage",
        ),
        ("cluster show --jsn", "waltz-core cluster show: unknown option '--jsn'; did you mean"),
        ("server run --prot=3", "unknown option '--prot'; did you mean '--port'?"),
        ("local up --partition-count 3", "did you mean '--partitions'?"),
        ("config show local extra", "waltz-core config show: unexpected argument 'extra'\n"),
        ("local status a=b", "waltz-core local status: unexpected argument 'a=b'\n"),
        ("client read --connect h:1/w --partition", "Option '--partition' requires an argument\n"),
        ("storage recover-partition --admin h:1 --partition 0", "expected either --from or --fr"),
        ("--jsn", "waltz-core: unknown option '--jsn'\n"),
        ("client read --partition x", "client read: --partition: 'x' is not a valid integer\n"),
        (
            "client append hi",
            "waltz-core client append: no cluster is given. Hint: use --connect",
        ),
        ("cluster add-replica", "required: PARTITIONS, HOST:PORT; and no cluster is given."),
    ],
)
def test_usage_errors_are_one_line_and_a_hint(capsys, arguments, sentence):
    assert main(arguments.split()) == EXIT_USAGE_ERROR
    output = capsys.readouterr()
    assert sentence in output.err
    assert output.err.count("\n") == 2
    assert output.err.endswith("--help`.\n")
    assert output.out == ""


def test_an_interrupt_while_modules_are_loaded_prints_no_traceback(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subcommands, "import_module", interrupted)
    assert main(["client", "watch"]) == EXIT_INTERRUPTED
