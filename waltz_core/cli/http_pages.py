"""`waltz-core server metrics | storage metrics`: print the metrics from a daemon's HTTP port.

Rules:
    1. A whole number, even a large one, is printed without a decimal point and without an exponent.
       Reason: numbers of bytes and IDs soon exceed 2^31.
    2. `--json` prints every metric under its full name with its labels.
"""

import http.client
import re
from typing import Final, NamedTuple

import click

from waltz_core.cli import shared_options as options
from waltz_core.cli.output import print_json, print_table
from waltz_core.cli.subcommands import subcommand
from waltz_core.errors import BadConfig, RemoteProtocolError, Unreachable
from waltz_core.transport.net import split_address

ANSWER_TIMEOUT_S: Final = 10.0
PAGE_BYTES_MAX: Final = 64 * 1024 * 1024
_SAMPLE_LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
# Only `--all` and `--json` print histogram buckets, because these have many lines.
_HISTOGRAM_SUFFIXES: Final = ("_bucket", "_created")


class MetricSample(NamedTuple):
    """One line of a metrics page: a metric, its labels and its value."""

    name: str
    labels: str
    value: int | float

    @property
    def title(self) -> str:
        """Return the name and labels as they are on the page."""
        return f"{self.name}{{{self.labels}}}" if self.labels else self.name


@subcommand
@options.argument("address", "HOST:HTTP_PORT", "host of the daemon, and its setting `http_port`")
@click.option(
    "--match", default="", metavar="TEXT", help="show only metrics whose name contains this text"
)
@click.option("--all", "shows_all", is_flag=True, help="also show the buckets of histograms")
@options.json_option
def metrics(*, address: str, match: str, shows_all: bool, as_json: bool) -> int:
    """Print the metrics of one daemon."""
    samples = [
        sample
        for sample in parse_metrics(fetch_page(address, "/metrics"), address)
        if match in sample.title
        and (shows_all or as_json or not sample.name.endswith(_HISTOGRAM_SUFFIXES))
    ]
    if as_json:
        print_json({sample.title: sample.value for sample in samples})
    else:
        print_table(("metric", "value"), [(sample.title, sample.value) for sample in samples])
    return 0


def fetch_page(address: str, path: str) -> str:
    """Return a page of a daemon; raises Unreachable, or RemoteProtocolError for an error page."""
    host, port = split_address(address)
    if not 1 <= port <= 65_535:
        raise BadConfig(f"{address}: expected the port of `http_port`, 1..65535, found {port}")
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read(PAGE_BYTES_MAX + 1)
    except OSError as error:
        raise Unreachable(f"{address}: {error}") from None
    except http.client.HTTPException as error:
        raise RemoteProtocolError(
            f"{address}: expected the HTTP port of a daemon (`http_port`), found a port that "
            f"does not speak HTTP ({type(error).__name__})"
        ) from None
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK or len(body) > PAGE_BYTES_MAX:
        raise RemoteProtocolError(
            f"{address}{path}: expected a page, found HTTP status {answer.status} and "
            f"{len(body)} bytes"
        )
    return body.decode("utf-8", "replace")


def parse_metrics(page: str, address: str) -> list[MetricSample]:
    """Parse a page in Prometheus text format into samples; raises RemoteProtocolError."""
    lines = [line.strip() for line in page.splitlines()]
    samples = []
    for line in lines:
        if line and not line.startswith("#"):
            match = _SAMPLE_LINE.fullmatch(line)
            value = None if match is None else _number(match[3])
            if match is None or value is None:
                raise RemoteProtocolError(
                    f"{address}/metrics: expected lines such as `name 1.0`, found {line!r:.100}"
                )
            samples.append(MetricSample(match[1], match[2] or "", value))
    return samples


def _number(text: str) -> int | float | None:
    """Parse a number (rule 1); return None if the text is not a number."""
    try:
        if text.lstrip("+-").isdecimal():
            return int(text)
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() else value
