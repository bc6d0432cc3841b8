"""The permission that a message requires: verbs, and the partitions for these verbs.

Each message class of `wire/` declares its requirement (decision 048, AC 1) with the types and
functions of this file. docs/reference/permissions.md is generated from these declarations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final, TypeAlias


class AccessVerb(Enum):
    """An operation that a grant permits for the partitions that it names."""

    READ = "read"
    APPEND = "append"
    ADMINISTER = "administer"
    REPLICATE = "replicate"


class Scope(Enum):
    """The partitions for which a principal must have the required verbs."""

    NAMED = "the partition that the message names, or each one if it names several"
    ANY = "at least one partition, whichever it is"
    ALL = "all partitions"


@dataclass(frozen=True, slots=True, eq=False)
class Requirement:
    """A permission: one of the verbs, or all of them if `needs_all`, within a scope.

    For equal requirements, `require_all` and `require_one` return the same object. Therefore the
    lookup for each request is fast.
    """

    verbs: tuple[AccessVerb, ...]
    scope: Scope
    needs_all: bool

    def __post_init__(self) -> None:
        assert self.verbs, "a requirement without a verb would be met by every principal"


class Exemption(Enum):
    """The reason why a message requires no permission."""

    ANSWER = "an answer: a port that receives it as a request closes the connection"
    CREDENTIAL = "the first message of a connection: it authenticates the client by a token"


@dataclass(frozen=True, slots=True)
class RequirementByField:
    """A requirement that depends on a field of the message, with an entry for each field value."""

    field: str
    requirements: Mapping[object, Requirement]


RequirementDeclaration: TypeAlias = Requirement | Exemption | RequirementByField

READ: Final = AccessVerb.READ
APPEND: Final = AccessVerb.APPEND
ADMINISTER: Final = AccessVerb.ADMINISTER
REPLICATE: Final = AccessVerb.REPLICATE
# NB: these constants and the functions have the union type. With other declarations, mypy infers a
# narrower type for each message class.
ANSWER: Final[RequirementDeclaration] = Exemption.ANSWER
CREDENTIAL: Final[RequirementDeclaration] = Exemption.CREDENTIAL


@cache
def require_all(*verbs: AccessVerb, scope: Scope = Scope.NAMED) -> RequirementDeclaration:
    """Return the requirement that a principal has every one of these verbs."""
    return Requirement(verbs, scope, needs_all=True)


@cache
def require_one(*verbs: AccessVerb, scope: Scope = Scope.NAMED) -> RequirementDeclaration:
    """Return the requirement that a principal has at least one of these verbs."""
    return Requirement(verbs, scope, needs_all=False)


def require_by_field(
    field: str, declarations: Mapping[object, RequirementDeclaration]
) -> RequirementDeclaration:
    """Return a requirement that depends on a field.

    `declarations` contains one requirement for each value of the field.
    """
    requirements = {
        value: declaration
        for value, declaration in declarations.items()
        if isinstance(declaration, Requirement)
    }
    assert len(requirements) == len(declarations), f"{field}: a value without a requirement"
    return RequirementByField(field, requirements)
