"""Parsing of the daemons' HTTP pages: exact numbers, and errors for unknown formats."""

import contextlib
import http.server
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltz_core import errors
from waltz_core.cli.http_pages import parse_metrics
from waltz_core.cli.main import main

PAGE = """\
# HELP waltz_x A number.
# TYPE waltz_x gauge
waltz_x{partition="0"} 2147483649.0
waltz_x{partition="1",of="a } b"} 1.23456789012e+11
waltz_seconds_bucket{le="+Inf"} 3.0
waltz_seconds_sum 0.25
waltz_none NaN

"""


@contextlib.contextmanager
def serve_page(body, status=200):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_metrics_are_shown_exactly_and_by_default_without_histogram_buckets(capsys):
    with serve_page(PAGE.encode()) as address:
        assert main(["server", "metrics", address]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[-1] for line in lines] == [
            *("value", "2147483649", "123456789012", "0.25", "nan")
        ]
        assert main(["storage", "metrics", address, "--match", "x{", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {
            'waltz_x{partition="0"}': 2147483649,
            'waltz_x{partition="1",of="a } b"}': 123456789012,
        }
        assert main(["server", "metrics", address, "--all", "--match", "bucket"]) == 0
        assert 'waltz_seconds_bucket{le="+Inf"}      3' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"<html>", 200, "/metrics: expected lines"),
        (b"", 404, "expected a page, found HTTP status 404"),
    ],
)
def test_a_page_in_another_format_is_reported(capsys, body, status, sentence):
    with serve_page(body, status) as address:
        assert main(["server", "metrics", address]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "sentence"),
    [("127.0.0.1:1", "127.0.0.1:1: "), ("x", "host:port"), ("x:0", "expected the port of")],
)
def test_a_missing_page_is_reported(capsys, address, sentence):
    assert main(["server", "metrics", address]) == 1
    (logged,) = capsys.readouterr().err.splitlines()
    assert sentence in logged


@given(st.integers(0, 2**53) | st.floats(allow_nan=False))
def test_a_number_is_parsed_without_loss(number):
    (sample,) = parse_metrics(f'name{{a="b"}} {number}\n', "x:1")
    assert sample == ("name", 'a="b"', number)
    if number == int(number) if abs(number) != float("inf") else False:
        assert isinstance(sample.value, int)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_rejected(text):
    with contextlib.suppress(errors.RemoteProtocolError):
        assert all(
            isinstance(parse_metric.value, int | float)
            for parse_metric in parse_metrics(text, "x:1")
        )
