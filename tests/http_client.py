"""An HTTP client that can send any bytes, even invalid requests."""

import asyncio


async def send_request(port: int, request: bytes) -> tuple[str, bytes]:
    """Send a request; return (status line, body) of the answer, which ends with the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0].decode(), body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
