"""`waltz-core` without a command, with `--help`, and with mistyped commands."""

import logging
import subprocess
import sys

import pytest

from tests.commands import is_subcommand, subcommands_of
from waltz_core import __version__
from waltz_core.cli.main import COMMAND_GROUPS, main
from waltz_core.cli.subcommands import EXIT_USAGE_ERROR
from waltz_core.config import CONFIG_TYPES_BY_KIND


def test_without_arguments_five_commands_are_shown(capsys):
    assert main([]) == EXIT_USAGE_ERROR
    output = capsys.readouterr().out
    assert output.count("waltz-core ") >= 5
    assert "local up" in output


@pytest.mark.parametrize("group", ["cluster", "storage", "server", "client", "disk", "local"])
def test_a_group_without_a_subcommand_shows_subcommands_and_examples(capsys, group):
    assert main([group]) == 0
    output = capsys.readouterr().out
    assert "Commands:" in output
    assert f"Examples:\n  waltz-core {group} " in output


def test_a_subcommand_of_two_words_is_shown_under_its_first_word(capsys):
    assert main(["access"]) == 0
    assert "\n  token        create and revoke tokens\n" in capsys.readouterr().out
    assert main(["access", "token"]) == 0
    assert "\n  revoke  revoke a token" in capsys.readouterr().out


def test_a_group_without_subcommands_runs_its_own_command(capsys):
    assert main(["bench"]) == EXIT_USAGE_ERROR
    assert "the following arguments are required: WORKLOAD" in capsys.readouterr().err


def test_the_help_of_a_subcommand_begins_with_its_description(capsys):
    assert main(["cluster", "prefer", "--help"]) == 0
    output = capsys.readouterr().out
    assert "Make a server the preferred owner of some partitions." in output


@pytest.mark.parametrize(
    "subcommand", [["show"], ["create", "--partitions", "1"], ["list"], ["show-key"]]
)
def test_a_missing_cluster_argument_is_reported(subcommand, capsys, monkeypatch):
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)
    assert main(["cluster", *subcommand]) == 1
    assert "no cluster is given. Hint: use --connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["show", "h:1"], ["show", "--connect", "h:1"], ["protect", "h:1"], ["show-key", "h:1"]],
)
def test_the_cluster_argument_overrides_the_environment(arguments, capsys, monkeypatch):
    monkeypatch.setenv("WALTZ_CONNECT", "other:1/never/asked")
    assert main(["cluster", *arguments]) == 1
    assert "'h:1' names no cluster root" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["add-replica", "assign-partition"], ["show-key", "show-cluster-key"]]
)
def test_an_error_for_a_command_of_waltz_0_13_names_the_new_command(arguments):
    subcommands = subcommands_of("cluster")
    groups, arguments_of_group = (subcommands[name] for name in arguments)
    assert arguments_of_group is groups


def test_a_daemon_imports_no_module_of_other_commands():
    code = (
        "import sys; from waltz_core.cli.main import main;"
        "assert main(['storage', 'run', '--help']) == main(['server', 'run', '--help']) == 0;"
        "assert 'numpy' not in sys.modules;"
        "import waltz_core.storage.process.storage_daemon;"
        "import waltz_core.server.process.server_daemon;"
        "print([each for each in sys.modules if each.startswith(('waltz_core.client', "
        "'waltz_core.cli.change_commands', 'waltz_core.cli.http_pages', 'psutil', 'pyspark', "
        "'rich', 'argparse'))])"
    )
    assert run_python(code) == "[]"


def test_help_imports_no_command_module_and_plain_output_does_not_import_rich():
    code = (
        "import sys; from waltz_core.cli.main import main;"
        "[main(words.split()) for words in ('--help', 'cluster', 'client --help', 'storage')];"
        "found = [each for each in sys.modules if each.startswith('waltz_core.cli.')];"
        "from waltz_core.cli.output import print_table; import waltz_core.cli.progress;"
        "print_table(['a'], [[1]]); print(*found, 'rich' in sys.modules)"
    )
    *imported, has_rich = run_python(code).split()
    assert {each.rpartition(".")[2] for each in imported} == {"main", "output", "subcommands"}
    assert has_rich == "False"


def run_python(code):
    """Run code in a new Python process; return the last line of its output."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()[-1]


def test_a_daemons_options_show_their_defaults(capsys):
    assert main(["server", "run", "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "(required, such as 127.0.0.1:2181/waltz/local)" in output
    assert "Port for clients; 0 uses any free port. (default 15180)" in output
    assert "If it is empty, the server uses `listen_host`. (default empty)" in output


@pytest.fixture
def restore_logging():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def test_the_logging_option_may_precede_a_command(tmp_path, capsys, restore_logging):
    path = tmp_path / "logging.toml"
    path.write_text("version = 1\ndisable_existing_loggers = false\n")
    assert main(["--logging", str(path), "config", "show", "local", "--json"]) == 0
    assert '"storage_count"' in capsys.readouterr().out
    assert main(["--logging", str(tmp_path / "none.toml"), "config", "show", "local"]) == 1
    assert "expected a logging.toml" in capsys.readouterr().err
    path.write_text('version = 1\n[loggers.waltz_core]\nlevel = "LOUD"\n')
    assert main(["--logging", str(path), "config", "show", "local"]) == 1
    assert "logger 'waltz_core': Unknown level: 'LOUD'" in capsys.readouterr().err


def test_every_command_has_a_help_page(capsys):
    for group in COMMAND_GROUPS:
        assert main([group, "--help"]) == 0
        for subcommand in () if is_subcommand(group) else subcommands_of(group):
            assert main([group, *subcommand.split(), "--help"]) == 0
    assert "--connect" in capsys.readouterr().out


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"waltz-core {__version__}\n"


@pytest.mark.parametrize("group", COMMAND_GROUPS)
def test_every_argument_and_option_of_a_command_is_explained(group):
    without_help = [
        f"{group} {name}: {each.name}"
        for name, subcommand in subcommands_of(group).items()
        for each in subcommand.params
        if not getattr(each, "hidden", False) and not each.help
    ]
    assert without_help == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("waltz-core ", set(COMMAND_GROUPS)),
        ("waltz-core cl", {"client", "cluster"}),
        ("waltz-core cluster add", {"add-storage", "add-replica"}),
        ("waltz-core access token ", {"create", "revoke"}),
        ("waltz-core client read --", {"--partition", "--first", "--last", "--connect", "--json"}),
        ("waltz-core config show ", set(CONFIG_TYPES_BY_KIND)),
    ],
)
def test_a_shell_completes_groups_subcommands_options_and_values(
    arguments, expected, capsys, monkeypatch
):
    monkeypatch.setenv("_WALTZ_CORE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", arguments)
    monkeypatch.setenv("COMP_CWORD", str(arguments.count(" ")))
    assert main([]) == 0
    found = {line.partition(",")[2] for line in capsys.readouterr().out.splitlines()}
    assert found - {"--help"} == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_completion_command_prints_a_script_for_a_shell(shell, capsys, monkeypatch):
    monkeypatch.setenv("_WALTZ_CORE_COMPLETE", f"{shell}_source")
    assert main([]) == 0
    assert "_WALTZ_CORE_COMPLETE" in capsys.readouterr().out
