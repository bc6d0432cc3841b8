"""Key services for option `encryptionKeys`; the tests pass this file to Spark's workers."""

import hashlib


def key_from_id(key_id: str) -> bytes:
    """Return the key of an ID."""
    return hashlib.sha256(key_id.encode()).digest()


def key_except_of_task_1(key_id: str) -> bytes | None:
    """Return the same keys; that of task 1 is destroyed."""
    return None if key_id == "task1-key" else key_from_id(key_id)
