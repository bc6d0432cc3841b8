"""Options of format("waltz"): every wrong one is a sentence that names it and the fix."""

import pytest

from waltz_core.errors import BadConfig
from waltz_spark.option_table import OPTIONS
from waltz_spark.options import (
    LOG_COLUMNS,
    OnCorrupt,
    OnLockFailure,
    check_names,
    parse_read,
    parse_write,
)

CLUSTER = {"path": "zk:2181/waltz/x"}


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("onLockFailur", "onLockFailure"),
        ("startingHighWatermark", "startingHighWaterMarks"),
        ("batch_size", "batchSize"),
        ("DATAFORMATS", "dataFormat"),
    ],
)
def test_a_misspelt_option_is_reported_with_the_nearest_right_one(key: str, nearest: str) -> None:
    with pytest.raises(BadConfig, match=f"did you mean '{nearest}'"):
        check_names({**CLUSTER, key: "1"})


def test_spark_s_own_keys_pass() -> None:
    check_names({**CLUSTER, "checkpointlocation": "/x", "queryname": "q", "provider": "waltz"})


def test_every_option_of_the_table_is_known_in_any_case() -> None:
    check_names({option.name.upper(): "x" for option in OPTIONS})


def test_the_error_for_no_cluster_lists_all_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_defaults_of_a_read() -> None:
    options = parse_read(CLUSTER)
    assert (options.starting, options.ending) == ("earliest", "latest")
    assert options.columns == LOG_COLUMNS
    assert options.partitions is None
    assert options.from_replica
    assert options.fail_on_data_loss


def test_a_group_is_a_number_and_for_replicas_only() -> None:
    assert parse_read(CLUSTER).group is None
    assert parse_read({**CLUSTER, "group": "0"}).group == 0
    assert parse_read({**CLUSTER, "group": "7", "readFrom": "replica"}).group == 7
    with pytest.raises(BadConfig, match="'group' needs readFrom=replica"):
        parse_read({**CLUSTER, "group": "7", "readFrom": "server"})
    for value in ("-1", "dc1", str(1 << 31)):
        with pytest.raises(BadConfig, match="option 'group': expected an integer from 0"):
            parse_read({**CLUSTER, "group": value})


def test_marks_are_json_by_partition() -> None:
    options = parse_read({**CLUSTER, "startingHighWaterMarks": '{"0": 41, "3": -1}'})
    assert options.starting == {0: 41, 3: -1}


@pytest.mark.parametrize("value", ["[]", '""', '[["0", 41]]', '{"0": 1, "00": 2}'])
def test_marks_that_are_no_object_are_rejected(value: str) -> None:
    with pytest.raises(BadConfig, match="'clientHighWaterMarks': expected JSON from partition"):
        parse_write({**CLUSTER, "clientHighWaterMarks": value})


def test_an_option_of_the_other_direction_is_rejected() -> None:
    with pytest.raises(BadConfig, match="'onLockFailure' is for writing, this is reading"):
        parse_read({**CLUSTER, "onLockFailure": "reject"})
    with pytest.raises(BadConfig, match="'partitions' is for reading, this is writing"):
        parse_write({**CLUSTER, "partitions": "1"})


def test_columns_are_checked_with_the_nearest_name() -> None:
    assert parse_read({**CLUSTER, "columns": "header, partition"}).columns == (
        "header",
        "partition",
    )
    with pytest.raises(BadConfig, match="did you mean 'transaction_id'"):
        parse_read({**CLUSTER, "columns": "transactionid"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("partitions", "0,x"),
        ("partitions", "-1"),
        ("transactionIds", "9-3"),
        ("transactionIds", ","),
        ("startingHighWaterMarks", "newest"),
        ("startingHighWaterMarks", "{"),
        ("startingHighWaterMarks", '{"0": "x"}'),
        ("startingHighWaterMarks", '{"0": -2}'),
        ("startingHighWaterMarks", "[1]"),
        ("startingHighWaterMarks", '{"a": 1}'),
        ("startingHighWaterMarks", '{"0": 9223372036854775808}'),
        ("startingHighWaterMarks", '{"0": 1, "0": 2}'),
        ("columnNameOfCorruptRecord", "data"),
        ("minPartitions", "0"),
        ("maxTransactionsPerTask", "many"),
        ("failOnDataLoss", "perhaps"),
        ("readFrom", "disk"),
        ("dataFormat", "xml"),
    ],
)
def test_values_out_of_bounds_are_rejected_by_name(name: str, value: str) -> None:
    with pytest.raises(BadConfig, match=name):
        parse_read({**CLUSTER, name: value})


def test_a_write_s_options() -> None:
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
    with pytest.raises(BadConfig, match="one of fail, reject, retry, found 'retries'"):
        parse_write({**CLUSTER, "onLockFailure": "retries"})
    with pytest.raises(BadConfig, match="'resultColumns' needs option resultsPath"):
        parse_write({**CLUSTER, "resultColumns": "a"})
    with pytest.raises(BadConfig, match="'writeId' needs exactlyOnce=true"):
        parse_write({**CLUSTER, "writeId": "a", "exactlyOnce": "false"})


def test_options_without_an_effect_are_rejected() -> None:
    retry = {**CLUSTER, "onLockFailure": "retry"}
    for name in ("maxRetries", "retryBackoff"):
        assert parse_write({**retry, name: "5", "recompute": "shop:again"}).recompute is not None
        with pytest.raises(BadConfig, match=f"'{name}' needs option 'recompute'"):
            parse_write({**retry, name: "5"})


def test_the_name_of_a_write() -> None:
    assert parse_write(CLUSTER).write_name is None
    assert parse_write({**CLUSTER, "writeId": "n-1"}).write_name == "n-1"
    assert parse_write({**CLUSTER, "writeId": "n", "batchId": "7"}).write_name == "n~7"
    assert parse_write({**CLUSTER, "writeId": "n-7"}).write_name == "n-7"
    with pytest.raises(BadConfig, match="'writeId': expected up to 140"):
        parse_write({**CLUSTER, "writeId": "n~7"})
    with pytest.raises(BadConfig, match="'batchId' needs option 'writeId'"):
        parse_write({**CLUSTER, "batchId": "7"})
    for bad in ("a/b", "..", "x" * 141, "ü"):
        with pytest.raises(BadConfig, match="option 'writeId': expected up to 140 letters"):
            parse_write({**CLUSTER, "writeId": bad})


def test_the_modes_for_bad_payloads() -> None:
    assert parse_read(CLUSTER).on_corrupt is OnCorrupt.FAIL
    packed = {**CLUSTER, "dataFormat": "json"}
    options = parse_read({**packed, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": "bad"})
    assert (options.on_corrupt, options.corrupt_column) == (OnCorrupt.NULLS, "bad")
    with pytest.raises(BadConfig, match="one of failfast, permissive, dropmalformed"):
        parse_read({**packed, "mode": "lenient"})
    for name in ("mode", "columnNameOfCorruptRecord"):
        with pytest.raises(BadConfig, match=f"option '{name}' needs option dataFormat"):
            parse_read({**CLUSTER, name: "permissive"})


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("startingOffsets", "startingHighWaterMarks"),
        ("endingOffsets", "endingHighWaterMarks"),
        ("maxOffsetsPerTrigger", "maxTransactionsPerTrigger"),
        ("kafka.bootstrap.servers", "connect"),
    ],
)
def test_an_option_of_kafka_leads_to_ours(name: str, ours: str) -> None:
    with pytest.raises(BadConfig, match=f"did you mean '{ours}'"):
        check_names({name: "x"})


def test_a_time_in_seconds_is_rejected() -> None:
    with pytest.raises(BadConfig, match=r"seems to be seconds\. Hint: use 1795471928000"):
        parse_read({**CLUSTER, "startingTimestamp": "1795471928"})
    options = parse_read({**CLUSTER, "startingTimestamp": "1795471928000"})
    assert options.starting_ms == 1_795_471_928_000
