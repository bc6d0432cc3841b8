"""A Spark Connect server in a separate process, like the one of `start-connect-server.sh`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyspark

from tests import table_libraries
from tests.ports import free_port
from tests.time_limits import TEST_TIMEOUT_S

SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"


@contextlib.contextmanager
def run_connect_server(log: Path) -> Iterator[str]:
    """Start a server of Spark Connect; give its address once it answers, and end it."""
    port = free_port()
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.warehouse.dir": str(log.parent / "warehouse"),
        **table_libraries.spark_settings(),
    }
    line = [str(submit), "--master", "local[2]", "--class", SERVER_CLASS]
    line += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*line, "spark-internal"], env=environment, stdout=output, stderr=output
        )
    try:
        wait_until_listening(process, port, log)
        yield f"sc://127.0.0.1:{port}"
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait(TEST_TIMEOUT_S)


def wait_until_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    paced = threading.Event()
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, log.read_text()
        paced.wait(0.2)
