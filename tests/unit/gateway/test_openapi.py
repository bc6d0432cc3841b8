"""The OpenAPI document describes all operations, and uses all schemas that it declares."""

import json

import pytest

from waltz_core.gateway import openapi


def references(value):
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def test_each_operation_is_described():
    document = openapi.openapi_document()
    found = {
        (details["operationId"], method.upper(), path)
        for path, methods in document["paths"].items()
        for method, details in methods.items()
    }
    assert found == {
        (operation.name, operation.method, operation.path) for operation in openapi.OPERATIONS
    }


def test_each_reference_is_resolved_and_each_schema_is_used():
    document = openapi.openapi_document()
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names == document["components"]["schemas"].keys()


@pytest.mark.parametrize("each", openapi.OPERATIONS, ids=lambda each: each.name)
def test_each_parameter_of_the_path_is_declared(each):
    details = openapi.openapi_document()["paths"][each.path][each.method.lower()]
    in_path = {
        parameter["name"] for parameter in details["parameters"] if parameter["in"] == "path"
    }
    assert in_path == {part[1:-1] for part in each.path.split("/") if part.startswith("{")}
    assert "default" in details["responses"]


def test_each_operation_has_its_error_statuses():
    for path in openapi.openapi_document()["paths"].values():
        for details in path.values():
            assert {"400", "401", "403", "429", "503"} <= details["responses"].keys()
            assert "Retry-After" in details["responses"]["503"]["headers"]
    responses = openapi.openapi_document()["paths"]["/v1/transactions"]["post"]["responses"]
    assert "ClientAheadOfLog" in responses["409"]["description"]
    assert "UnsupportedMediaType" in responses["415"]["description"]


def test_the_document_is_json():
    document = openapi.openapi_document()
    assert json.loads(json.dumps(document)) == document
    assert document["openapi"] == "3.1.0"
