"""The exchange in which a token establishes the principal of a connection (decision 048, AC 3).

The exchange is the same in all three protocols. After the hellos, the dialer sends its token. The
listener accepts the token, or answers with an error and closes the connection. A listener also uses
`rejected_answer` for a request that it denies, or that exceeds a limit.
"""

from dataclasses import replace
from typing import Final, TypeAlias

from waltz_core.errors import Overloaded, RemoteProtocolError, WaltzError, error_from_code
from waltz_core.records.record import NO_SESSION, ClientId, Generation, PartitionId, ReqId
from waltz_core.wire.admin_messages import (
    AdminFailure,
    AdminMessage,
    AdminRejected,
    AuthenticateForAdmin,
    Done,
)
from waltz_core.wire.messages import (
    Authenticate,
    AuthenticateAtStorage,
    Authenticated,
    ClientMessage,
    ErrorResponse,
    Message,
    Nack,
    StorageMessage,
    SuccessResponse,
    WireProtocol,
)

Credential: TypeAlias = Authenticate | AuthenticateAtStorage | AuthenticateForAdmin
CREDENTIAL_TYPES: Final = (Authenticate, AuthenticateAtStorage, AuthenticateForAdmin)

_NO_REQ_ID: Final = ReqId(ClientId(-1), Generation(-1), PartitionId(-1), -1)


def credential_message(protocol: WireProtocol, version: int, secret: bytes) -> Credential | None:
    """Return the message with the dialer's token.

    Return None if this version of the protocol has no such message, and therefore no access
    control.
    """
    credential: Credential
    match protocol:
        case WireProtocol.CLIENT:
            credential = Authenticate(_NO_REQ_ID, secret)
        case WireProtocol.STORAGE:
            credential = AuthenticateAtStorage(-1, -1, -1, secret)
        case _:
            assert protocol is WireProtocol.ADMIN
            credential = AuthenticateForAdmin(-1, secret)
    return credential if version >= credential.since else None


def accepted_answer(message: Credential) -> Message:
    """Return the listener's answer to a valid token."""
    match message:
        case Authenticate():
            return Authenticated(message.req_id)
        case AuthenticateAtStorage():
            return SuccessResponse(message.session_id, message.sequence, message.partition_id)
        case AuthenticateForAdmin():
            return Done(message.sequence)


def rejected_answer(message: Message, version: int | None, error: WaltzError) -> Message:
    """Return the listener's answer to a token or another request, rejected with `error`."""
    retry_after_ms = error.retry_after_ms if isinstance(error, Overloaded) else 0
    if isinstance(message, ClientMessage):
        answer = ErrorResponse(message.req_id, error.code, error.retriable, str(error))
        return replace(answer, retry_after_ms=retry_after_ms)
    if isinstance(message, StorageMessage):
        prefix = message.session_id, message.sequence, message.partition_id
        nack = Nack(*prefix, error.code, NO_SESSION, str(error))
        return replace(nack, retry_after_ms=retry_after_ms)
    assert isinstance(message, AdminMessage)
    if version == 0:
        return AdminFailure(message.sequence, f"{type(error).__name__}: {error}", ())
    return AdminRejected(message.sequence, error.code, str(error))


def error_in_answer(answer: Message) -> WaltzError | None:
    """Return the error in the listener's answer; None if the listener has accepted the token."""
    match answer:
        case Authenticated() | SuccessResponse() | Done():
            return None
        case ErrorResponse() | Nack():
            return error_from_code(
                answer.error_code, answer.message, retry_after_ms=answer.retry_after_ms
            )
        case AdminRejected():
            return error_from_code(answer.error_code, answer.text)
        case _:
            return RemoteProtocolError(
                f"expected an answer to a token, found {type(answer).__name__}"
            )
