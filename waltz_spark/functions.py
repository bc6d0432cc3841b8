"""Computes lock columns in Spark SQL without Python UDFs, with the hashes of the client library."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from waltz_core.errors import BadRequest
from waltz_core.records.record import lock_hash

_INTEGER_TYPES = ("tinyint", "smallint", "int", "bigint")


def lock(name: str, key: Column | str) -> Column:
    """Return the 32-bit hash of a lock as an `int` column, which is null if `key` is null.

    Args:
        name: the kind of the locked object, such as `"account"`.
        key: the column that identifies the object. An integer is used directly; for a string, the
            CRC-32 of its UTF-8 bytes is used, as in `waltz_core.client.lock`.

    The code narrows 64-bit integers with masks and shifts, never with a cast that ANSI mode could
    reject (docs/design/wire-format.md 4; docs/spark.md, "Writing").

    Raises:
        BadRequest: `name` is not a string.
    """
    if not isinstance(name, str):
        raise BadRequest(f"lock {name!r}: expected a string as its name")
    column = F.col(key) if isinstance(key, str) else key
    kind = F.typeof(column)
    wide_key = (
        F.when(kind == "string", F.crc32(column.cast("string").cast("binary")))
        .when(kind.isin(*_INTEGER_TYPES), column.cast("string").try_cast("bigint"))
        .otherwise(_raise_for_type(kind))
    )
    low_bits = F.lit(0xFFFFFFFF)
    folded_key = wide_key.bitwiseXOR(F.shiftrightunsigned(wide_key, 32)).bitwiseAND(low_bits)
    mixed_hash = folded_key.bitwiseXOR(F.lit(lock_hash(name, 0) & 0xFFFFFFFF))
    sign_bit = mixed_hash.bitwiseAND(F.lit(0x80000000))
    return (mixed_hash - sign_bit - sign_bit).cast("int")


def _raise_for_type(kind: Column) -> Column:
    text = F.lit("the key of a lock must be an integer or a string, not ")
    return F.raise_error(F.concat(text, kind)).cast("bigint")


def partition_of(hashed: Column, partition_count: int) -> Column:
    """Return the log partition for a 32-bit hash; all clients compute the same partition.

    Args:
        hashed: an int column, such as a result of `lock`.
        partition_count: the number of partitions of the log.

    The product of two 32-bit numbers does not fit into a signed 64-bit integer. Therefore the code
    multiplies the lower and the upper 16 bits separately. `record.spread` is the same rule for one
    value.
    """
    golden = F.lit(0x9E3779B1)
    low_16_bits = F.lit(0xFFFF)
    wide_hash = hashed.cast("bigint").bitwiseAND(F.lit(0xFFFFFFFF))
    low_product = wide_hash.bitwiseAND(low_16_bits) * golden
    high_product = F.shiftleft(
        (F.shiftrightunsigned(wide_hash, 16) * golden).bitwiseAND(low_16_bits), 16
    )
    mixed = (low_product + high_product).bitwiseAND(F.lit(0xFFFFFFFF))
    return F.shiftrightunsigned(mixed * F.lit(partition_count), 32).cast("int")
