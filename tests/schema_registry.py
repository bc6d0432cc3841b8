"""A schema registry with Confluent's HTTP API, in the process of a test.

The registry checks compatibility by the rule BACKWARD: a reader with the new schema must be able to
read payloads of the last version of the subject. Tests can inject the faults that a client must
survive.
"""

import base64
import contextlib
import io
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import fastavro
from fastavro.read import SchemaResolutionError
from fastavro.schema import SchemaParseException, UnknownType
from fastavro.utils import generate_one

SchemaAnswer = dict[str, object]


class InProcessRegistry:
    """Schemas by ID and by subject. `fault` replaces each answer."""

    def __init__(self) -> None:
        self.by_id: dict[int, SchemaAnswer] = {}
        self.subjects: dict[str, list[int]] = {}
        self.requests: list[tuple[str, str]] = []
        self.user: str | None = None
        # (status, body), "drip", "silent", or "reset"
        self.fault: tuple[int, bytes] | str | None = None
        self.ended = threading.Event()
        self.url = ""

    def add(
        self, text: str, kind: str = "AVRO", references: list[SchemaAnswer] | None = None
    ) -> int:
        """Store a schema without a subject; return its ID."""
        answer: SchemaAnswer = {"schema": text}
        if kind != "AVRO":
            answer["schemaType"] = kind
        if references:
            answer["references"] = references
        for schema_id, known in self.by_id.items():
            if known == answer:
                return schema_id
        schema_id = len(self.by_id) + 1
        self.by_id[schema_id] = answer
        return schema_id

    def put(self, subject: str, text: str, kind: str = "AVRO", **more: object) -> int:
        """Store a version of a subject, without a check; return its ID."""
        schema_id = self.add(text, kind, **more)  # type: ignore[arg-type]
        versions = self.subjects.setdefault(subject, [])
        if schema_id not in versions:
            versions.append(schema_id)
        return schema_id

    def reply(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        parts = [unquote(each) for each in urlsplit(path).path.strip("/").split("/")]
        match method, parts:
            case "GET", ["schemas", "ids", number]:
                if int(number) not in self.by_id:
                    return 404, {"error_code": 40403, "message": "Schema not found"}
                return 200, self.by_id[int(number)]
            case "GET", ["subjects", subject, "versions", version]:
                return self._version(subject, version)
            case "POST", ["subjects", subject, "versions"]:
                return self._register(subject, json.loads(body))
        return 404, {"error": "not found"}

    def _version(self, subject: str, version: str) -> tuple[int, object]:
        versions = self.subjects.get(subject)
        if versions is None:
            return 404, {"error_code": 40401, "message": f"Subject '{subject}' not found."}
        number = len(versions) if version == "latest" else int(version)
        if not 1 <= number <= len(versions):
            return 404, {"error_code": 40402, "message": f"Version {version} not found."}
        schema_id = versions[number - 1]
        return 200, {"subject": subject, "version": number, "id": schema_id} | self.by_id[schema_id]

    def _register(self, subject: str, request: SchemaAnswer) -> tuple[int, object]:
        text, kind = str(request["schema"]), str(request.get("schemaType", "AVRO"))
        if kind == "AVRO":
            try:
                new = fastavro.parse_schema(json.loads(text))
            except (SchemaParseException, UnknownType) as error:
                return 422, {"error_code": 42201, "message": f"Invalid schema: {error}"}
            for last in self.subjects.get(subject, [])[-1:]:
                if not can_read(new, json.loads(str(self.by_id[last]["schema"]))):
                    return 409, {"error_code": 409, "message": "Schema being registered is "
                                 "incompatible with an earlier schema"}  # fmt: skip
        return 200, {"id": self.put(subject, text, kind)}


def can_read(new: object, old: object) -> bool:
    """Whether a schema reads values of an older one."""
    old = fastavro.parse_schema(old)
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, old, generate_one(old))
    try:
        fastavro.schemaless_reader(io.BytesIO(sink.getvalue()), old, new)
    except SchemaResolutionError:
        return False
    return True


class RegistryHandler(BaseHTTPRequestHandler):
    """Answers the requests of a registry that a subclass names."""

    registry: InProcessRegistry

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, body: bytes) -> None:
        registry = self.registry
        registry.requests.append((self.command, self.path))
        match registry.fault:
            case "silent":
                registry.ended.wait()
            case "drip":
                self.drip()
            case "reset":
                pass
            case (int(status), bytes(found)):
                self.send(status, found)
            case _ if not self.is_permitted():
                self.send(401, b'{"error_code":401,"message":"Unauthorized"}')
            case _:
                status, reply = registry.reply(self.command, self.path, body)
                self.send(status, json.dumps(reply).encode())

    def is_permitted(self) -> bool:
        user = self.registry.user
        if user is None:
            return True
        expected = f"Basic {base64.b64encode(user.encode()).decode()}"
        return self.headers["Authorization"] == expected

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", "http://127.0.0.1:1/")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has closed the connection
            self.wfile.write(body)

    def drip(self) -> None:
        """Send one byte after the other, so that each read returns soon."""
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.registry.ended.wait(0.05):
                self.wfile.write(b"a")
                self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def run_schema_registry(tls: ssl.SSLContext | None = None) -> Iterator[InProcessRegistry]:
    """Run a schema registry at `url`."""
    registry = InProcessRegistry()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("_Answers", (RegistryHandler,), {"registry": registry})
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    registry.url = f"http://127.0.0.1:{server.server_address[1]}"
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        registry.url = registry.url.replace("http:", "https:")
    try:
        yield registry
    finally:
        registry.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
