"""Each message declares the permission that it requires (rule 6 of messages.py)."""

import dataclasses
from pathlib import Path

import pytest

from scripts.reference.permissions import PROTOCOLS
from waltz_core.access.requirements import (
    ANSWER,
    APPEND,
    CREDENTIAL,
    READ,
    REPLICATE,
    AccessVerb,
    RequirementByField,
    Scope,
    require_all,
)
from waltz_core.values import value
from waltz_core.wire.codec import message_classes
from waltz_core.wire.messages import (
    OWN_HEADERS,
    AppendFollowing,
    AppendRequest,
    ClientMessage,
    OpenRequest,
    RangeForm,
    RegistryOperation,
    WireProtocol,
)

PAGE = Path(__file__).parents[3] / "docs/reference/permissions.md"
MESSAGES = [message_class for protocol in PROTOCOLS for message_class in message_classes(protocol)]
VERBS = [verb.value for verb in AccessVerb]


def requirements(message):
    """Return the requirement of each form of a request."""
    declared = message.requires
    return (
        list(declared.requirements.values())
        if isinstance(declared, RequirementByField)
        else [declared]
    )


def test_a_message_class_without_a_declaration_is_an_error():
    with pytest.raises(TypeError, match="UndeclaredMessage: expected a declaration `requires`"):

        @value(frozen=True, slots=True)
        class UndeclaredMessage(ClientMessage):
            code = 127


@pytest.mark.parametrize("body", [{"code": 127}, {}])
def test_an_inherited_declaration_is_ignored(body):
    with pytest.raises(TypeError, match="Heir: expected a declaration"):
        type("Heir", (AppendRequest,), body)
    assert type("Heir", (AppendRequest,), {**body, "requires": ANSWER}).requires is ANSWER


def test_a_message_class_that_extends_another_class_declares_its_own_requirement():
    assert AppendRequest.requires == require_all(APPEND)
    assert AppendFollowing.requires == require_all(READ, APPEND)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: each.__name__)
def test_the_generated_page_lists_each_message_with_the_permissions_that_it_requires(message):
    page = PAGE.read_text(encoding="utf-8")
    if message.requires in (ANSWER, CREDENTIAL):
        assert f"`{message.__name__}` {message.code}" in page
        return
    start = f"| {message.code} | `{message.__name__}`"
    lines = [line for line in page.splitlines() if line.startswith((f"{start} |", f"{start}, "))]
    shown = [dict(zip(VERBS, line.split("|")[3:7], strict=True)) for line in lines]
    for cells, requirement in zip(shown, requirements(message), strict=True):
        found = {verb for verb, cell in cells.items() if cell.strip()}
        assert found == {verb.value for verb in requirement.verbs}


@pytest.mark.parametrize(
    "message",
    [each for each in MESSAGES if isinstance(each.requires, RequirementByField)],
    ids=lambda each: each.__name__,
)
def test_a_permission_by_field_covers_every_value_of_the_field(message):
    (field,) = [f for f in dataclasses.fields(message) if f.name == message.requires.field]
    expected = {"form": {*RangeForm, OWN_HEADERS}, "operation": {*RegistryOperation}}
    assert set(message.requires.requirements) == expected.get(field.name, {False, True})


def test_each_protocol_has_one_message_with_a_credential():
    protocols = [message.protocol for message in MESSAGES if message.requires is CREDENTIAL]
    assert protocols == list(PROTOCOLS)


def test_requests_scoped_to_a_partition_have_a_partition():
    names = {"req_id", "partition_id", "partitions"}
    unknown = [
        message.__name__
        for message in MESSAGES
        if message.requires not in (ANSWER, CREDENTIAL)
        and any(requirement.scope is Scope.NAMED for requirement in requirements(message))
        and not names & {field.name for field in dataclasses.fields(message)}
    ]
    assert not unknown


def test_a_storage_request_that_changes_data_requires_the_verb_replicate():
    requests = [
        message_class
        for message_class in message_classes(WireProtocol.STORAGE)
        if message_class.requires not in (ANSWER, CREDENTIAL)
    ]
    open_to_readers = {
        request.__name__
        for request in requests
        if any(
            requirement.verbs != (REPLICATE,) or requirement.scope is not Scope.NAMED
            for requirement in requirements(request)
        )
    }
    assert open_to_readers == {OpenRequest.__name__, "RangeRaw"}
