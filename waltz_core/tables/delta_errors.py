"""Classifies errors of deltalake by their text, because this library has few error classes.

Rules:
    1. `Unavailable` and `Superseded` are temporary: errors of the network, of an overloaded or
       restarting store, and conflicts with another commit. After these errors, the follower tries
       again. All other errors, including unknown ones, end the follower.
    2. A message contains the table and one sentence, without the library's stack trace. The answer
       of an object store is shown as status, code and text.
"""

import re
from typing import Final, NamedTuple, TypeAlias

from waltz_core.errors import BadConfig, BadFormat, BadRequest, Superseded, Unavailable

LibraryError: TypeAlias = BadConfig | BadFormat | BadRequest | Superseded | Unavailable

# The beginning of an error that the SQL of the merge raises, and a pattern that finds this error in
# the library's text.
TWO_PARTITIONS_PREFIX: Final = "key in two partitions: "
_TWO_PARTITIONS_TEXT = re.compile(rf"{TWO_PARTITIONS_PREFIX}(\(.*\) in partition .*)\.'", re.DOTALL)
_COLOR_CODES = re.compile(r"\x1b\[\d+m")
_ERROR_PREFIXES = re.compile(r"(?:(?:Kernel|Generic DeltaTable|External) error(?: ->|:)?\s+)+")
_STACK_TRACE = re.compile(r"\s+0: <unknown>")
# The answer of an object store in XML, after its status.
_STORE_ANSWER = re.compile(r"status code\W+(\d{3}[ \w]*\w)(?:.*<Code>(\w+)</Code>)?", re.DOTALL)
_ANSWER_TEXT = re.compile(r"<Message>([^<]*)</Message>")
_TEMPORARY_ERRORS = (
    r"after \d+ retries|error sending request|timed out|status code\W+(?:408|429|5\d\d)"
)
CREDENTIALS_HINT = (
    "Hint: check the credentials in the environment (for S3: AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY) and their permissions."
)
PERMISSION_HINT = "Hint: the user of this process needs write permission in the directory."


class _KnownError(NamedTuple):
    """The meaning of an error text: class, cause (by default, the library's text), and hint."""

    text: re.Pattern[str]
    kind: type[LibraryError]
    cause: str | None
    hint: str


_KNOWN_ERRORS = tuple(
    _KnownError(re.compile(text, re.IGNORECASE | re.DOTALL), kind, cause, hint)
    for text, kind, cause, hint in (
        (
            r"Failed to commit transaction|existing table version",
            Superseded,
            "another commit came first",
            "",
        ),
        (
            "rows failed validation check",
            BadRequest,
            None,
            "Hint: drop the constraint or NOT NULL of the table, or select transactions by header.",
        ),
        (
            r"169\.254\.169\.254|metadata\.google\.internal",
            BadConfig,
            "the object store needs credentials, and the environment has none",
            "Hint: for S3, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ),
        (
            "NoSuchBucket",
            BadConfig,
            "the bucket does not exist",
            "Hint: create it, or correct the URL of the table.",
        ),
        (
            "redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed",
            BadConfig,
            "the bucket is in another region",
            "Hint: set AWS_REGION to the region of the bucket.",
        ),
        (
            "URL scheme is not allowed",
            BadConfig,
            "the object store has a URL without TLS",
            "Hint: use https, or set AWS_ALLOW_HTTP=true.",
        ),
        (
            r"status code\W+501",
            BadRequest,
            None,
            "Hint: the object store must support conditional writes.",
        ),
        (
            "Unknown scheme",
            BadConfig,
            "the URL has an unknown scheme",
            "Hint: pass a directory, or a URL such as s3://bucket/path.",
        ),
        (
            _TEMPORARY_ERRORS,
            Unavailable,
            None,
            "",
        ),
        (r"status code\W+40[013]", BadConfig, None, CREDENTIALS_HINT),
        (
            r"\(os error (?:1|13|30)\)",
            BadConfig,
            None,
            PERMISSION_HINT,
        ),
        (
            r"Object at location \S+ not found|fetch metadata for file",
            BadFormat,
            None,
            "Hint: a program has deleted a file of the table; build the table again.",
        ),
        ("", BadRequest, None, ""),
    )
)


def library_error(table: str, error: Exception) -> LibraryError:
    """Convert an error of the library to an error of the project."""
    text = _COLOR_CODES.sub("", str(error))
    if match := _TWO_PARTITIONS_TEXT.search(text):
        return BadRequest(
            f"table {table}: expected the changes of a key in one partition, found key "
            f"{match[1]}, and partitions have no common order. Hint: use a key that includes the "
            "columns that determine the partition."
        )
    known_error = next(candidate for candidate in _KNOWN_ERRORS if candidate.text.search(text))
    cause = known_error.cause or _one_line_cause(text)
    return known_error.kind(". ".join(filter(None, (f"table {table}: {cause}", known_error.hint))))


def _one_line_cause(text: str) -> str:
    """Return the cause in an error's text as one line (rule 2)."""
    if answer := _STORE_ANSWER.search(text):
        status, code = answer.groups()
        reasons = [code, *_ANSWER_TEXT.findall(text)[:1]]
        reasons_text = ": ".join(reason for reason in reasons if reason)
        return f"the object store answers {status}{f' ({reasons_text})' * bool(reasons_text)}"
    line = " ".join(_STACK_TRACE.split(_ERROR_PREFIXES.sub("", text, 1))[0].split())
    return line.replace(" ↳ ", ": ")[:300].rstrip(". ")
