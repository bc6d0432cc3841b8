"""The permission that each message requires, from the declarations of the messages."""

from collections.abc import Iterable, Iterator
from enum import Enum

from scripts.reference.markdown import code, table
from waltz_core.access.requirements import (
    ANSWER,
    CREDENTIAL,
    AccessVerb,
    Exemption,
    Requirement,
    RequirementByField,
    Scope,
)
from waltz_core.wire.codec import message_classes
from waltz_core.wire.messages import Message, WireProtocol

PROTOCOLS = (WireProtocol.CLIENT, WireProtocol.STORAGE, WireProtocol.ADMIN)


def tables() -> dict[str, str]:
    """Return the scopes and, for each protocol, a matrix, the answers and the credentials."""
    texts = {"scopes": table(("scope", ""), [(code(s.name.lower()), s.value) for s in Scope])}
    for protocol in PROTOCOLS:
        area = protocol.name.lower()
        classes = sorted(message_classes(protocol), key=lambda each: (each.code, each.since))
        texts[f"{area}-requests"] = _matrix(classes)
        for name, role in (("answers", ANSWER), ("credentials", CREDENTIAL)):
            texts[f"{area}-{name}"] = ", ".join(
                f"{code(each.__name__)} {each.code}" for each in classes if each.requires is role
            )
    return texts


def rows(message: type[Message]) -> Iterator[tuple[str, Requirement]]:
    """Yield each form of a request, as "wants_feed = true" or empty, and its requirement."""
    match message.requires:
        case Requirement() as requirement:
            yield "", requirement
        case RequirementByField(field, requirements):
            for value, requirement in requirements.items():
                name = value.name if isinstance(value, Enum) else str(value)
                yield f"{field} = {name.lower()}", requirement
        case Exemption():
            return


def _matrix(messages: Iterable[type[Message]]) -> str:
    return table(
        ("code", "message", *(verb.value for verb in AccessVerb), "scope"),
        [
            (
                message.code,
                f"{code(message.__name__)}, {code(condition)}"
                if condition
                else code(message.__name__),
                *(_cell(verb, requirement) for verb in AccessVerb),
                requirement.scope.name.lower(),
            )
            for message in messages
            for condition, requirement in rows(message)
        ],
    )


def _cell(verb: AccessVerb, requirement: Requirement) -> str:
    if verb not in requirement.verbs:
        return ""
    is_required = requirement.needs_all or len(requirement.verbs) == 1
    return "required" if is_required else "sufficient"
