"""A client for a schema registry with Confluent's HTTP API.

This client requests a schema by its ID or by the version of a subject, and registers schemas. The
registry itself checks the compatibility of versions.

Rules:
    1. The class of an error shows its cause:
       - `BadFormat`: a payload names a schema that does not exist, or a schema is not valid.
       - `BadConfig`: URL, credentials, subject or version are wrong.
       - `BadRequest`: the registry rejects a new schema.
       - `Unavailable`: the registry does not answer now. An outage is never reported as a missing
         schema.
    2. All requests for one schema share one time limit, including the requests for the schemas to
       which it refers. Each address of the registry gets an equal share of the remaining time. If
       an address does not answer within its share, the next address is used.
    3. A schema refers to at most `REFERENCES_MAX` other schemas, directly or indirectly.
"""

import json
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from waltz_core.errors import BadConfig, BadFormat, BadRequest, Unavailable
from waltz_core.records.strict_json import from_json
from waltz_core.schemas.registered_schemas import NamedSchema, RegisteredSchema, SchemaType
from waltz_core.schemas.registry_urls import addresses_of
from waltz_core.schemas.schema_prefix import SCHEMA_ID_MAX

if TYPE_CHECKING:
    from waltz_core.schemas.registry_http import HttpAnswer

TIMEOUT_S: Final = 10.0
REFERENCES_MAX: Final = 100
SCHEMA_CHARACTERS_MAX: Final = 1024 * 1024
_CONTENT_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_ACCEPT: Final = f"{_CONTENT_TYPE}, application/json"
_REASON_CHARACTERS_MAX: Final = 300


class SchemaRegistry:
    """A client for a schema registry.

    Args:
        urls: the URL of the registry, or several URLs with commas. The client uses the first URL
            that answers.
        auth_file: a file with `user:password` for basic authentication.
        timeout_s: the time limit of rule 2, in seconds.

    Raises:
        BadConfig: a URL is not valid.
    """

    def __init__(
        self, urls: str, auth_file: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._addresses = addresses_of(urls)
        self._auth_file = auth_file
        self._timeout_s = timeout_s

    def __str__(self) -> str:
        return ", ".join(map(str, self._addresses))

    def schema(self, schema_id: int, kind: SchemaType) -> RegisteredSchema:
        """Request the schema with an ID.

        Raises:
            BadFormat: the schema does not exist, or is of another kind.
            BadConfig, Unavailable: see rule 1.
        """
        lookup = _SchemaLookup(self, kind)
        reply = lookup.send_request(f"/schemas/ids/{schema_id}")
        if reply is None:
            raise BadFormat(f"schema {schema_id} does not exist in the schema registry at {self}")
        return lookup.resolve_schema(schema_id, reply)

    def subject_schema(
        self, subject: str, version: int | None, kind: SchemaType
    ) -> RegisteredSchema:
        """Request a version of a subject's schema; if None, the latest version.

        Raises:
            BadFormat: the schema is of another kind.
            BadConfig, Unavailable: see rule 1.
        """
        lookup = _SchemaLookup(self, kind)
        reply = lookup.subject_schema(subject, "latest" if version is None else version)
        return lookup.resolve_schema(_schema_id(reply, str(self)), reply)

    def register(self, subject: str, kind: SchemaType, text: str) -> RegisteredSchema:
        """Register a schema under a subject, if it is new, and return it with its ID.

        Raises:
            BadRequest: the schema is not valid, or not compatible with the subject's schemas.
            BadConfig, Unavailable: see rule 1.
        """
        lookup = _SchemaLookup(self, kind)
        request_fields: dict[str, Any] = {"schema": text}
        if kind is not SchemaType.AVRO:  # earlier versions of the API have Avro only
            request_fields["schemaType"] = kind.value
        reply = lookup.send_request(f"/subjects/{quote(subject, safe='')}/versions", request_fields)
        if reply is None:
            raise BadConfig(
                f"the schema registry at {self} cannot register a schema under subject "
                f"{subject!r}: expected a schema ID, found status 404"
            )
        return RegisteredSchema(_schema_id(reply, str(self)), kind, text)

    def send_to_any_address(self, path: str, body: bytes | None, deadline_s: float) -> "HttpAnswer":
        """Send a request to one address after the other; return the first answer (rules 1, 2)."""
        # Most clients use no schema registry, and importing http.client takes 30 ms.
        from waltz_core.schemas.registry_http import basic_auth, request  # noqa: PLC0415

        headers = {"Accept": _ACCEPT, "User-Agent": "waltz"}
        if body is not None:
            headers["Content-Type"] = _CONTENT_TYPE
        if self._auth_file is not None:
            headers["Authorization"] = basic_auth(self._auth_file)
        failure = Unavailable(f"the schema registry at {self} did not answer in time")
        for remaining_addresses, address in zip(
            range(len(self._addresses), 0, -1), self._addresses, strict=True
        ):
            now_s = time.monotonic()
            until_s = now_s + (deadline_s - now_s) / remaining_addresses
            try:
                answer = request(address, path, body=body, headers=headers, deadline_s=until_s)
            except Unavailable as error:
                failure = error
                continue
            if answer.status < 500 and answer.status != 429:
                return answer
            failure = Unavailable(
                f"the schema registry at {address} answers with status {answer.status}: "
                f"{answer.body_text}"
            )
        raise failure


class _SchemaLookup:
    """The requests for one schema (rules 2 and 3)."""

    def __init__(self, registry: SchemaRegistry, kind: SchemaType) -> None:
        self._registry = registry
        self._kind = kind
        self._deadline_s = time.monotonic() + registry._timeout_s

    def send_request(
        self, path: str, request_fields: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Send a request; return the object in the answer, None if the resource does not exist."""
        if request_fields is None and self._kind is SchemaType.PROTOBUF:
            path += "?format=serialized"
        body = None if request_fields is None else json.dumps(request_fields).encode()
        answer = self._registry.send_to_any_address(path, body, self._deadline_s)
        reply = _json_object(answer.body)
        if answer.status == 200 and reply is not None:
            return reply
        # An answer without an error code comes from a web server that is not a schema registry.
        if answer.status == 404 and reply is not None and "error_code" in reply:
            return None
        raise _rejection_error(answer, reply, str(self._registry))

    def subject_schema(self, subject: str, version: object) -> dict[str, Any]:
        """Request a version of a subject's schema; raises BadConfig if it does not exist."""
        reply = self.send_request(f"/subjects/{quote(subject, safe='')}/versions/{version}")
        if reply is None:
            raise BadConfig(
                f"the schema registry at {self._registry} has no version {version} of subject "
                f"{subject!r}"
            )
        return reply

    def resolve_schema(self, schema_id: int, reply: dict[str, Any]) -> RegisteredSchema:
        """Return the schema in an answer, with the schemas to which it refers."""
        schema_text = f"schema {schema_id} of the schema registry at {self._registry}"
        schemas_by_version: dict[tuple[str, int], NamedSchema | None] = {}
        self._collect_references(reply, schemas_by_version, schema_text)
        references = tuple(
            referenced_schema
            for referenced_schema in schemas_by_version.values()
            if referenced_schema is not None
        )
        return RegisteredSchema(
            schema_id, self._kind, self._schema_text(reply, schema_text), references
        )

    def _collect_references(
        self,
        reply: dict[str, Any],
        schemas_by_version: dict[tuple[str, int], NamedSchema | None],
        location: str,
    ) -> None:
        """Add the references of a schema, each after its own references."""
        for name, subject, version in _parse_references(reply, location):
            key = (subject, version)
            if key in schemas_by_version:
                continue
            if len(schemas_by_version) >= REFERENCES_MAX:  # rule 3
                raise BadFormat(
                    f"{location}: expected at most {REFERENCES_MAX} referenced schemas, found more"
                )
            schemas_by_version[key] = None  # ends the recursion if a schema refers to itself
            part = self.subject_schema(subject, version)
            self._collect_references(part, schemas_by_version, location)
            del schemas_by_version[key]  # moves the schema after its own references
            schemas_by_version[key] = NamedSchema(name, self._schema_text(part, location))

    def _schema_text(self, reply: dict[str, Any], location: str) -> str:
        kind = reply.get("schemaType", SchemaType.AVRO.value)
        if kind != self._kind.value:
            raise BadFormat(
                f"{location}: expected a schema of kind {self._kind.value}, found {kind!r}"
            )
        text = reply.get("schema")
        if not isinstance(text, str) or len(text) > SCHEMA_CHARACTERS_MAX:
            raise BadFormat(
                f"{location}: expected a text of up to {SCHEMA_CHARACTERS_MAX} characters as schema"
            )
        return text


def _json_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = from_json(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _schema_id(reply: dict[str, Any], registry_url: str) -> int:
    schema_id = reply.get("id")
    if type(schema_id) is not int or not 0 <= schema_id <= SCHEMA_ID_MAX:
        raise BadConfig(
            f"the schema registry at {registry_url}: expected a schema ID, found {schema_id!r:.100}"
        )
    return schema_id


def _parse_references(reply: dict[str, Any], location: str) -> list[tuple[str, str, int]]:
    given = reply.get("references") or []
    if not isinstance(given, list):
        raise BadFormat(f"{location}: expected a list of references, found {type(given).__name__}")
    references = []
    for reference in given:
        fields = reference if isinstance(reference, dict) else {}
        name, subject, version = (fields.get(key) for key in ("name", "subject", "version"))
        if not isinstance(name, str) or not isinstance(subject, str) or type(version) is not int:
            raise BadFormat(f"{location}: expected references with name, subject and version")
        references.append((name, subject, version))
    return references


def _rejection_error(
    answer: "HttpAnswer", reply: dict[str, Any] | None, registry_url: str
) -> Exception:
    """Return the error for an answer that contains no result (rule 1)."""
    status = answer.status
    reason = answer.body_text
    if reply is not None and isinstance(reply.get("message"), str):
        reason = repr(reply["message"][:_REASON_CHARACTERS_MAX])
    registry = f"the schema registry at {registry_url}"
    if status in (401, 403):
        return BadConfig(
            f"{registry} rejects the credentials with status {status}: {reason}. Hint: pass a "
            "file with user:password as argument auth_file, in Spark as option "
            "schemaRegistryAuthFile."
        )
    if status == 409:
        return BadRequest(
            f"{registry}: the new schema is not compatible with the subject's schemas: {reason}. "
            "Hint: a new column must be nullable."
        )
    if status in (400, 422) and reply is not None:
        return BadRequest(f"{registry} rejects the request with status {status}: {reason}")
    if 300 <= status < 400:
        return BadConfig(
            f"{registry} answers with a redirect, which Waltz does not follow. Hint: use the "
            "final URL."
        )
    return BadConfig(
        f"{registry_url}: expected Confluent's HTTP API, found an answer of status {status}: "
        f"{reason}. "
        "Hint: check the URL of the schema registry."
    )
