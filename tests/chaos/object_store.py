"""The object store of a chaos cluster: S3 over HTTP, behind a proxy that faults kill.

    python -m tests.chaos.object_store bucket HOST     # moto's server
    python -m tests.chaos.object_store front HOST      # the proxy: forwards PORT to the bucket

moto keeps objects in memory. A store that loses acknowledged objects violates rule AR 3 of decision
047, and the cluster does not tolerate this violation. So faults kill only the proxy. A kill
interrupts the uploads in progress. The store may have executed an upload, but not answered it yet.
All connections fail until the proxy is started again.

The bucket's process reads commands from standard input, and answers each with a line:

    age MS           move the times of all objects back by MS; the answer is their number
    save DIRECTORY   write all objects with their times to a directory; the answer is their number
"""

import logging
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import FakeBucket, s3_backends
from moto.server import ThreadedMotoServer
from pyarrow import fs

from tests.fault.port_proxy import PortProxy

PORT, BUCKET_PORT = 9000, 9001
BUCKET, FOLDER, REGION = "bucket", "folder", "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def url_at(host: str) -> str:
    """Return the URL of the archive behind the proxy at an address."""
    query = f"endpoint_override={host}:{PORT}&scheme=http&region={REGION}"
    return f"s3://{BUCKET}/{FOLDER}?{query}"


def bucket(host: str) -> None:
    """Serve S3, and execute commands until standard input ends."""
    os.environ.update(CREDENTIALS)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=host, port=BUCKET_PORT, verbose=False)
    server.start()
    endpoint = {"endpoint_override": f"{host}:{BUCKET_PORT}", "scheme": "http", "region": REGION}
    fs.S3FileSystem(allow_bucket_creation=True, **endpoint).create_dir(BUCKET)
    found = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET]
    _answer("ready")
    for line in sys.stdin:
        order, _, argument = line.strip().partition(" ")
        if order == "age":
            _answer(str(_age(found, int(argument))))
        else:
            _answer(str(_save(found, Path(argument))))


def _age(found: FakeBucket, by_ms: int) -> int:
    keys = list(found.keys.values())
    for key in keys:
        key.last_modified -= timedelta(milliseconds=by_ms)
    return len(keys)


def _save(found: FakeBucket, directory: Path) -> int:
    """Write all objects to a directory, except the empty ones that S3 has for folders."""
    keys = [each for each in list(found.keys.values()) if not each.name.endswith("/")]
    for key in keys:
        path = directory / key.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(key.value)
        written_s = key.last_modified.timestamp()
        os.utime(path, (written_s, written_s))
    return len(keys)


def forward_connections(host: str) -> None:
    """Forward connections until this process is killed."""
    with PortProxy(lambda: BUCKET_PORT, host=host, port=PORT):
        _answer("store ready")
        signal.pause()


def _answer(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"bucket": bucket, "front": forward_connections}[sys.argv[1]](sys.argv[2])
