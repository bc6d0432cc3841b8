"""Encrypts the payloads of a write and decrypts those of a read, like `Encryption` of the client.

Rules (docs/decisions/064):
    1. Only tasks read keys: options contain a reference to the keys, and the ID of a key.
    2. Rows are encrypted when they are sent, each time with another salt. Before the encryption,
       rows are converted, compared and spooled as plain text.
    3. A payload that cannot be decrypted is null, and `ERROR_COLUMN` has the reason.
"""

import pyarrow as pa

from waltz_core.encryption.envelopes import ENVELOPE_OVERHEAD_BYTES, Encryption
from waltz_core.encryption.key_ids import KEY_ID_BYTES_MAX
from waltz_spark.options import ERROR_COLUMN, ReadOptions, WriteOptions

# The column of an append batch with the ID of each row's key, for `encryptionKeyIdColumn`.
KEY_ID_COLUMN = "encryption_key_id"
# The maximum number of bytes that encryption adds to a payload.
ADDED_BYTES_MAX = ENVELOPE_OVERHEAD_BYTES + KEY_ID_BYTES_MAX


def decryption_of(options: ReadOptions | WriteOptions) -> Encryption | None:
    """Return the encryption for a read or a write, None without keys; only tasks call it (rule 1).

    A write also decrypts: it reads back rows that earlier attempts have written.

    Raises:
        BadConfig: the directory or function of option `encryptionKeys` does not exist, or
            `cryptography` is not installed.
    """
    if options.encryption_keys is None:
        return None
    is_required = isinstance(options, ReadOptions) and options.requires_encryption
    return Encryption.from_reference(options.encryption_keys, is_required=is_required)


def decrypt_batch(batch: pa.RecordBatch, encryption: Encryption) -> dict[str, pa.Array]:
    """Decrypt a batch from one partition and return its columns, with `ERROR_COLUMN` (rule 3).

    Args:
        batch: columns of the log; `partition`, `header` and `data` are required.
        encryption: the keys.
    """
    columns_by_name = {name: batch.column(name) for name in batch.schema.names}
    if batch.num_rows:
        payloads = encryption.decrypt_column(
            columns_by_name["data"],
            partition=columns_by_name["partition"][0].as_py(),
            headers=columns_by_name["header"].to_numpy().tolist(),
        )
        columns_by_name |= {"data": payloads.data, ERROR_COLUMN: payloads.errors}
    else:
        columns_by_name[ERROR_COLUMN] = pa.array([], pa.string())
    return columns_by_name


class PayloadEncryptor:
    """Encrypts the rows of one write."""

    def __init__(self, options: WriteOptions) -> None:
        assert options.encryption_keys is not None
        self._encryption = Encryption.from_reference(options.encryption_keys)
        self._key_id = options.encryption_key_id

    def encrypt_columns(self, append: pa.RecordBatch, partition: int) -> pa.RecordBatch:
        """Encrypt the payloads of rows for one partition; return the append columns without `crc`.

        Raises:
            BadConfig: a key does not exist.
            The errors of the key provider.
        """
        names = [name for name in append.schema.names if name not in {"crc", KEY_ID_COLUMN}]
        key_ids = [self._key_id or ""] * append.num_rows
        if KEY_ID_COLUMN in append.schema.names:
            key_ids = append.column(KEY_ID_COLUMN).to_pylist()
        data = self._encryption.encrypt_column(
            append.column("data"),
            partition=partition,
            headers=append.column("header").to_numpy().tolist(),
            key_ids=key_ids,
        )
        columns = [data if name == "data" else append.column(name) for name in names]
        return pa.RecordBatch.from_arrays(columns, names)
