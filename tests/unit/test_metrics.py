"""The table of metrics, and the page with all of them."""

import re

import pytest

from waltz_core.machine import Report
from waltz_core.metrics import METRIC_BY_NAME, MetricKind, Metrics


def test_metric_names_have_their_prefix_and_unit():
    for metric in METRIC_BY_NAME.values():
        assert re.fullmatch(r"waltz_(server|storage|gateway|client|spark)(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric.name
        assert metric.kind is not MetricKind.HISTOGRAM or metric.name.endswith("_seconds")
        assert metric.help


def test_counters_and_gauges_show_their_values():
    metrics = Metrics("server")
    metrics.add("waltz_server_appended_transactions_total", 10, partition=0)
    metrics.add("waltz_server_appended_transactions_total", 5, partition=0)
    metrics.add("waltz_server_appended_transactions_total", 1, partition=1)
    metrics.set("waltz_server_connections", 3)
    assert metrics.value("waltz_server_appended_transactions_total", partition=0) == 15
    assert metrics.value("waltz_server_appended_transactions_total", partition=1) == 1
    assert metrics.value("waltz_server_appended_transactions_total", partition=2) == 0
    assert metrics.value("waltz_server_connections") == 3


def test_a_counter_appears_on_the_page_with_its_first_count_and_grows():
    metrics, name = Metrics("server"), "waltz_server_appended_batches_total"
    metrics.add(name, 0, partition=4)
    assert b'waltz_server_appended_batches_total{partition="4"} 0.0\n' in metrics.page()
    for look in (1, 2):
        metrics.add(name, partition=4)
        metrics.add(name, partition="4")
        assert metrics.value(name, partition=4) == 2 * look
        assert f'{name}{{partition="4"}} {2.0 * look}\n'.encode() in metrics.page()


def test_a_gauge_with_a_callback_is_read_when_shown():
    metrics, held = Metrics("server"), [7.0]
    metrics.set_source("waltz_server_queued_bytes", lambda: held[0])
    assert metrics.value("waltz_server_queued_bytes") == 7
    held[0] = 9
    assert b"waltz_server_queued_bytes 9.0\n" in metrics.page()


def test_a_report_increments_the_counter_of_its_name():
    metrics = Metrics("storage")
    metrics.report(Report("segment_rolled", (("partition", 3),)))
    metrics.report(Report("segment_rolled"))
    assert metrics.value("waltz_storage_events_total", event="segment_rolled") == 2


def test_the_metrics_of_moved_partitions_are_removed():
    metrics = Metrics("server")
    for partition in (1, 2):
        metrics.set("waltz_server_high_water_mark", 5, partition=partition)
        metrics.set("waltz_server_replica_wait_seconds", 1, partition=partition, replica="a:1")
    metrics.forget(partition=1)
    page = metrics.page()
    assert b'partition="1"' not in page
    assert page.count(b'partition="2"') == 2


def test_the_counters_of_a_returning_partition_start_from_zero():
    metrics, name = Metrics("server"), "waltz_server_appended_transactions_total"
    for partition in (1, 2):
        metrics.add(name, 5, partition=partition)
    metrics.forget(partition=1)
    metrics.add(name, 2, partition=1)
    metrics.add(name, 2, partition=2)
    assert metrics.value(name, partition=1) == 2
    assert metrics.value(name, partition=2) == 7


def test_invalid_metric_names_labels_kinds_and_negative_counts_raise_errors():
    metrics = Metrics("server")
    with pytest.raises(KeyError):
        metrics.add("waltz_server_apended_transactions_total", partition=0)
    with pytest.raises(ValueError, match="label"):
        metrics.add("waltz_server_appended_transactions_total", shard=0)
    with pytest.raises(AssertionError):
        metrics.set("waltz_server_appended_transactions_total", 1, partition=0)
    with pytest.raises(AssertionError):
        metrics.add("waltz_server_appended_transactions_total", -1, partition=0)
    with pytest.raises(AssertionError):
        metrics.add("waltz_server_connections")
    with pytest.raises(AssertionError, match="no metric of the area"):
        Metrics("sever")


def test_durations_fall_into_buckets():
    metrics = Metrics("storage")
    for seconds in (0.003, 0.005, 30):
        metrics.observe("waltz_storage_sync_seconds", seconds)
    page = metrics.page().decode()
    assert 'waltz_storage_sync_seconds_bucket{le="0.0025"} 0.0' in page
    assert 'waltz_storage_sync_seconds_bucket{le="0.005"} 2.0' in page
    assert 'waltz_storage_sync_seconds_bucket{le="10.0"} 2.0' in page
    assert 'waltz_storage_sync_seconds_bucket{le="+Inf"} 3.0' in page
    assert "waltz_storage_sync_seconds_count 3.0" in page
    assert "waltz_storage_sync_seconds_sum 30.008" in page


def test_two_daemons_in_one_process_are_independent():
    first, second = Metrics("server"), Metrics("server")
    first.set("waltz_server_partitions", 4)
    assert second.value("waltz_server_partitions") == 0


def test_process_metrics_are_optional():
    assert b"process_cpu_seconds_total" in Metrics("server", has_process_metrics=True).page()
    assert b"process_cpu_seconds_total" not in Metrics("server").page()
