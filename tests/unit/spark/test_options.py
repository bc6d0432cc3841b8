"""Options of format("waltz"): errors name the invalid option and the correction."""

from collections.abc import Callable

import pytest

from waltz_core.errors import BadConfig
from waltz_spark.option_table import OPTIONS
from waltz_spark.options import (
    LOG_COLUMNS,
    CorruptPayloadMode,
    OnLockFailure,
    check_names,
    parse_read,
    parse_write,
)

CLUSTER = {"path": "zk:2181/waltz/x"}


MARKS = "startingHighWaterMarks"


@pytest.mark.parametrize(
    ("parse", "name", "value", "sentence"),
    [
        (check_names, "onLockFailur", "1", "did you mean 'onLockFailure'?"),
        (check_names, "startingHighWatermark", "1", f"did you mean '{MARKS}'?"),
        (check_names, "batch_size", "1", "did you mean 'batchSize'?"),
        (check_names, "DATAFORMATS", "1", "did you mean 'dataFormat'?"),
        (check_names, "startingOffsets", "x", f"did you mean '{MARKS}'?"),
        (check_names, "endingOffsets", "x", "did you mean 'endingHighWaterMarks'"),
        (check_names, "maxOffsetsPerTrigger", "x", "did you mean 'maxTransactionsPerTrigger'"),
        (check_names, "kafka.bootstrap.servers", "x", "did you mean 'connect'?"),
        (
            parse_read,
            "onLockFailure",
            "reject",
            "'onLockFailure' is for writing, but it was used for reading",
        ),
        (
            parse_write,
            "transactionIds",
            "1",
            "'transactionIds' is for reading, but it was used for writing",
        ),
        (parse_read, MARKS, "newest", MARKS),
        (parse_read, MARKS, "{", MARKS),
        (parse_read, MARKS, '{"0": "x"}', MARKS),
        (parse_read, MARKS, '{"0": -2}', MARKS),
        (parse_read, MARKS, "[1]", MARKS),
        (parse_read, MARKS, '{"a": 1}', MARKS),
        (parse_read, MARKS, '{"0": 9223372036854775808}', MARKS),
        (parse_read, MARKS, '{"0": 1, "0": 2}', MARKS),
        (parse_write, "clientHighWaterMarks", "[]", "expected a JSON object"),
        (parse_write, "clientHighWaterMarks", '""', "expected a JSON object"),
        (parse_write, "clientHighWaterMarks", '[["0", 41]]', "expected a JSON object"),
        (parse_write, "clientHighWaterMarks", '{"0": 1, "00": 2}', "expected a JSON object"),
        (parse_read, "partitions", "0,x", "partitions"),
        (parse_read, "partitions", "-1", "partitions"),
        (parse_read, "transactionIds", "9-3", "transactionIds"),
        (parse_read, "transactionIds", ",", "transactionIds"),
        (parse_read, "columnNameOfCorruptRecord", "data", "columnNameOfCorruptRecord"),
        (parse_read, "minPartitions", "0", "minPartitions"),
        (parse_read, "maxTransactionsPerTask", "many", "maxTransactionsPerTask"),
        (parse_read, "failOnDataLoss", "perhaps", "failOnDataLoss"),
        (parse_read, "readFrom", "disk", "readFrom"),
        (parse_read, "dataFormat", "xml", "dataFormat"),
        (parse_read, "columns", "transactionid", "did you mean 'transaction_id'?"),
        (parse_write, "onLockFailure", "retries", "one of fail, reject, retry, found 'retries'"),
        (parse_write, "resultColumns", "a", "'resultColumns' needs option resultsPath"),
        (parse_write, "batchId", "7", "'batchId' needs option 'writeId'"),
        (parse_write, "writeId", "n~7", "'writeId': expected up to 140"),
        (parse_write, "writeId", "a/b", "'writeId': expected up to 140"),
        (parse_write, "writeId", "..", "'writeId': expected up to 140"),
        (parse_write, "writeId", "x" * 141, "'writeId': expected up to 140"),
        (parse_write, "writeId", "ü", "'writeId': expected up to 140 letters"),
        (parse_read, "mode", "permissive", "option 'mode' needs option dataFormat"),
        (parse_read, "columnNameOfCorruptRecord", "x", "'columnNameOfCorruptRecord' needs option"),
        (
            parse_read,
            "startingTimestamp",
            "1795471928",
            r"seems to be seconds\. Hint: use 1795471928000",
        ),
        (parse_read, "group", "-1", "option 'group': expected an integer from 0"),
        (parse_read, "group", "dc1", "option 'group': expected an integer from 0"),
        (parse_read, "group", str(1 << 31), "option 'group': expected an integer from 0"),
    ],
)
def test_a_wrong_option_is_reported_in_one_sentence(
    parse: Callable[[dict[str, str]], object], name: str, value: str, sentence: str
) -> None:
    with pytest.raises(BadConfig, match=sentence):
        parse({**CLUSTER, name: value})


def test_options_of_spark_itself_are_accepted() -> None:
    check_names({**CLUSTER, "checkpointlocation": "/x", "queryname": "q", "provider": "waltz"})


def test_documented_options_are_accepted_case_insensitively() -> None:
    check_names({option.name.upper(): "x" for option in OPTIONS})


def test_the_error_for_a_missing_cluster_lists_the_three_ways_to_name_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WALTZ_CONNECT", raising=False)
    with pytest.raises(BadConfig) as caught:
        parse_read({})
    for way in ("load(...)", "option 'connect'", "$WALTZ_CONNECT"):
        assert way in str(caught.value)


def test_the_environment_names_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALTZ_CONNECT", "zk:2181/waltz/env")
    assert parse_read({}).connect == "zk:2181/waltz/env"
    assert parse_read({"connect": "zk:2181/waltz/option"}).connect == "zk:2181/waltz/option"
    both = {"connect": "zk:2181/waltz/option", "path": "zk:2181/waltz/path"}
    assert parse_read(both).connect == "zk:2181/waltz/path"


def test_the_options_of_a_read_have_defaults_and_are_parsed() -> None:
    options = parse_read(CLUSTER)
    assert (options.starting_marks, options.ending_marks) == ("earliest", "latest")
    assert options.columns == LOG_COLUMNS
    assert options.partitions is None
    assert options.reads_from_replicas
    assert options.fails_on_data_loss
    found = parse_read({**CLUSTER, MARKS: '{"0": 41, "3": -1}', "columns": "header, partition"})
    assert found.starting_marks == {0: 41, 3: -1}
    assert found.columns == ("header", "partition")
    since = parse_read({**CLUSTER, "startingTimestamp": "1795471928000"})
    assert since.starting_time_ms == 1_795_471_928_000


def test_a_group_is_a_number_and_requires_a_read_from_replicas() -> None:
    assert parse_read(CLUSTER).group is None
    assert parse_read({**CLUSTER, "group": "0"}).group == 0
    assert parse_read({**CLUSTER, "group": "7", "readFrom": "replica"}).group == 7
    with pytest.raises(BadConfig, match="'group' needs readFrom=replica"):
        parse_read({**CLUSTER, "group": "7", "readFrom": "server"})


def test_options_of_a_write_are_parsed() -> None:
    options = parse_write(
        {
            **CLUSTER,
            "onLockFailure": "reject",
            "batchSize": "10",
            "resultsPath": "r",
            "resultColumns": "a, b",
        }
    )
    assert options.on_lock_failure is OnLockFailure.REJECT
    assert options.batch_rows == 10
    assert options.result_columns == ("a", "b")
    assert options.partitions is None
    assert parse_write({**CLUSTER, "partitions": "3, 1"}).partitions == (1, 3)
    with pytest.raises(BadConfig, match="'writeId' needs exactlyOnce=true"):
        parse_write({**CLUSTER, "writeId": "a", "exactlyOnce": "false"})


def test_options_without_an_effect_are_rejected() -> None:
    retry = {**CLUSTER, "onLockFailure": "retry"}
    for name in ("maxRetries", "retryBackoff"):
        assert (
            parse_write({**retry, name: "5", "recompute": "shop:again"}).recompute_function
            is not None
        )
        with pytest.raises(BadConfig, match=f"'{name}' needs option 'recompute'"):
            parse_write({**retry, name: "5"})


def test_the_write_name_is_derived_from_the_options() -> None:
    assert parse_write(CLUSTER).write_name is None
    assert parse_write({**CLUSTER, "writeId": "n-1"}).write_name == "n-1"
    assert parse_write({**CLUSTER, "writeId": "n", "batchId": "7"}).write_name == "n~7"
    assert parse_write({**CLUSTER, "writeId": "n-7"}).write_name == "n-7"


def test_the_mode_for_corrupt_payloads_is_parsed() -> None:
    assert parse_read(CLUSTER).corrupt_payload_mode is CorruptPayloadMode.FAIL
    packed = {**CLUSTER, "dataFormat": "json"}
    options = parse_read({**packed, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": "bad"})
    assert (options.corrupt_payload_mode, options.corrupt_column) == (
        CorruptPayloadMode.NULLS,
        "bad",
    )
    with pytest.raises(BadConfig, match="one of failfast, permissive, dropmalformed"):
        parse_read({**packed, "mode": "lenient"})
