"""What a person meets first: the overview, the helps, and sentences for what was not meant."""

import logging
import subprocess
import sys

import pytest

from waltz_core.cli import main as cli
from waltz_core.cli.main import NOUNS, main, noun_of
from waltz_core.cli.parsing import NOT_UNDERSTOOD


def test_without_a_word_five_commands_are_shown(capsys):
    assert main([]) == NOT_UNDERSTOOD
    told = capsys.readouterr().out
    assert told.count("waltz-core ") >= 5
    assert "local up" in told


@pytest.mark.parametrize("noun", ["cluster", "storage", "server", "client", "disk", "local"])
def test_a_noun_alone_shows_its_verbs_and_examples(capsys, noun):
    with pytest.raises(SystemExit) as ended:
        main([noun])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "verbs:" in told
    assert f"examples:\n  waltz-core {noun} " in told


def test_a_noun_that_is_a_verb_itself_is_run_and_not_explained(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code == 2
    assert "the following arguments are required: workload" in capsys.readouterr().err


def test_a_verbs_help_begins_with_what_it_does(capsys):
    with pytest.raises(SystemExit):
        main(["cluster", "prefer", "--help"])
    assert "Have a server own some partitions before all others." in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb", [["show"], ["create", "--partitions", "1"], ["list"], ["show-key"]]
)
def test_a_cluster_is_asked_for_in_a_sentence(verb, capsys, monkeypatch):
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)
    assert main(["cluster", *verb]) == 1
    assert "which cluster? Give --connect zk1:2181" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["show", "h:1"], ["show", "--connect", "h:1"], ["protect", "h:1"], ["show-key", "h:1"]],
)
def test_a_cluster_may_be_named_either_way(words, capsys, monkeypatch):
    monkeypatch.setenv("WALTZ_CONNECT", "other:1/never/asked")
    assert main(["cluster", *words]) == 1
    assert "'h:1' names no cluster root" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["add-replica", "assign-partition"], ["show-key", "show-cluster-key"]]
)
def test_names_of_the_original_lead_to_ours(words):
    ours, theirs = (
        cli.verbs_of(cli.verbs_of(cli.parser_for("cluster"))["cluster"])[w] for w in words
    )
    assert ours.description
    assert theirs.description == ours.description


@pytest.mark.parametrize("noun", ["storage", "server"])
def test_a_daemon_imports_nothing_of_the_other_verbs_and_has_the_same_flags(noun):
    code = (
        "import sys; from waltz_core.cli import main as cli;"
        f"cli.parser_for({noun!r}, 'run'); assert 'numpy' not in sys.modules;"
        f"import waltz_core.{noun}.process.{noun}_daemon;"
        "print([each for each in sys.modules if each.startswith(('waltz_core.client', "
        "'waltz_core.cli.changing', 'waltz_core.cli.http_pages', 'psutil', 'pyspark'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    alone, whole = (
        cli.verbs_of(cli.verbs_of(cli.parser_for(noun, verb))[noun]) for verb in ("run", "")
    )
    assert list(alone) == ["run"]
    assert alone["run"].format_help() == whole["run"].format_help()


def test_a_daemons_flags_tell_what_holds_without_them(capsys):
    with pytest.raises(SystemExit):
        main(["server", "run", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "(required, such as 127.0.0.1:2181/waltz/local)" in told
    assert "0: any free one. (default 15180)" in told
    assert "Empty: `listen_host`. (default empty)" in told


@pytest.fixture
def logging_as_before():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


@pytest.mark.parametrize(
    ("words", "noun"),
    [
        ([], ""),
        (["--version"], ""),
        (["local", "up", "--partitions", "4"], "local"),
        (["--logging", "conf/logging.toml", "cluster", "show"], "cluster"),
        (["--logging=x", "doctor", "--json"], "doctor"),
    ],
)
def test_a_command_is_found_behind_options(words, noun):
    assert noun_of(words) == noun


def test_logging_may_stand_before_a_command(tmp_path, capsys, logging_as_before):
    path = tmp_path / "logging.toml"
    path.write_text("version = 1\ndisable_existing_loggers = false\n")
    assert main(["--logging", str(path), "config", "show", "local", "--json"]) == 0
    assert '"storage_count"' in capsys.readouterr().out
    assert main(["--logging", str(tmp_path / "none.toml"), "config", "show", "local"]) == 1
    assert "expected a logging.toml" in capsys.readouterr().err
    path.write_text('version = 1\n[loggers.waltz_core]\nlevel = "LOUD"\n')
    assert main(["--logging", str(path), "config", "show", "local"]) == 1
    assert "logger 'waltz_core': Unknown level: 'LOUD'" in capsys.readouterr().err


def test_every_command_says_what_it_takes(capsys):
    for noun in NOUNS:
        with pytest.raises(SystemExit) as ended:
            main([noun, "--help"])
        assert ended.value.code == 0
    assert "--connect" in capsys.readouterr().out


@pytest.mark.parametrize("noun", NOUNS)
def test_every_word_that_a_verb_takes_is_explained(noun):
    whole = cli.verbs_of(cli.parser_for(noun))[noun]
    verbs = cli.verbs_of(whole) or {noun: whole}
    unexplained = [
        f"{noun} {name}: {action.metavar or action.dest}"
        for name, verb in verbs.items()
        for action in verb._actions
        if not action.help
    ]
    assert unexplained == []
