"""Encrypts the payloads of a write, and decrypts those of a read; see `Encryption` of the client.

Rules (docs/decisions/064):
    1. Keys are read by tasks only: options have a reference to keys, and the ID of a key.
    2. Rows are encrypted when they are sent, each time with another salt. Until then they are
       shaped, compared and spooled as plain text.
    3. A payload that cannot be decrypted is null, and `ERROR_COLUMN` has the reason.
"""

import pyarrow as pa

from waltz_core.encryption.envelopes import ENVELOPE_BYTES, Encryption
from waltz_core.encryption.key_ids import KEY_ID_BYTES_MAX
from waltz_spark.options import ERROR_COLUMN, ReadOptions, WriteOptions

# The column of an append with the ID of each row's key, for option `encryptionKeyIdColumn`.
KEY_COLUMN = "encryption_key_id"
# The bytes that encryption adds to a payload at most.
ROW_BYTES_MAX = ENVELOPE_BYTES + KEY_ID_BYTES_MAX


def decryption_of(options: ReadOptions | WriteOptions) -> Encryption | None:
    """Return the encryption of a read or a write, also for reading back; in a task (rule 1).

    Raises:
        BadConfig: there is no such directory or function, or `cryptography` is not installed.
    """
    if options.encryption_keys is None:
        return None
    is_required = isinstance(options, ReadOptions) and options.encryption_required
    return Encryption.of(options.encryption_keys, is_required=is_required)


def decrypt_batch(batch: pa.RecordBatch, encryption: Encryption) -> dict[str, pa.Array]:
    """Return the columns of a batch of one partition, with `ERROR_COLUMN` (rule 3).

    Args:
        batch: the log's columns, with `partition`, `header` and `data`.
        encryption: the keys.
    """
    found = {name: batch.column(name) for name in batch.schema.names}
    if batch.num_rows:
        payloads = encryption.decrypt_column(
            found["data"],
            partition=found["partition"][0].as_py(),
            headers=found["header"].to_numpy().tolist(),
        )
        found |= {"data": payloads.data, ERROR_COLUMN: payloads.errors}
    else:
        found[ERROR_COLUMN] = pa.array([], pa.string())
    return found


class PayloadEncryptor:
    """Encrypts the rows of one write."""

    def __init__(self, options: WriteOptions) -> None:
        assert options.encryption_keys is not None
        self._encryption = Encryption.of(options.encryption_keys)
        self._key_id = options.encryption_key_id

    def encrypt_columns(self, append: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        """Return the append columns of rows of one partition with envelopes, without their CRCs.

        Raises:
            BadConfig: there is no such key.
            The errors of the key provider.
        """
        kept = [name for name in append.schema.names if name not in {"crc", KEY_COLUMN}]
        key_ids = [self._key_id or ""] * append.num_rows
        if KEY_COLUMN in append.schema.names:
            key_ids = append.column(KEY_COLUMN).to_pylist()
        data = self._encryption.encrypt_column(
            append.column("data"),
            partition=partition,
            headers=append.column("header").to_numpy().tolist(),
            key_ids=key_ids,
        )
        columns = [data if name == "data" else append.column(name) for name in kept]
        return pa.RecordBatch.from_arrays(columns, kept)
