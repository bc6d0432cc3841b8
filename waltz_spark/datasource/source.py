"""`format("waltz")`: the data source that Spark creates on the driver.

Spark creates the data source for every `load` and `save`, pickles it between processes, and shows
its errors to the user. So all options are checked here, at once. The reader and the writer are
imported on demand. Spark also uses this module in processes that only look up the format and its
schema, and need no client.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import BinaryType, StringType, StructType

from waltz_core.config.settings import first_names_text
from waltz_core.errors import BadRequest, WaltzError
from waltz_core.records.unpacking import columns_matching
from waltz_spark.option_table import Purpose
from waltz_spark.options import (
    CorruptPayloadMode,
    ReadOptions,
    WriteOptions,
    check_names,
    parse_read,
    parse_write,
)
from waltz_spark.rows import (
    DECRYPTION_REASON,
    check_log_column_types,
    check_nullable,
    check_packed_type,
    log_columns_ddl,
)
from waltz_spark.worker_errors import without_stack


class WaltzDataSource(DataSource):
    """The log as a table: reads return ranges of it, writes append to it.

    A read returns `partition`, `transaction_id`, `header`, `request_id`, `commit_time`, `data`, or
    the columns of your schema with option `dataFormat`. A write appends each row as one
    transaction. `docs/reference/spark-options.md` lists all options.

        spark.read.format("waltz").load("zk1:2181/waltz/payments")
        df.write.format("waltz").mode("append").save("zk1:2181/waltz/payments")
    """

    @without_stack
    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        check_names(options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "waltz"

    @without_stack
    def schema(self) -> str:
        """Return the DDL of the log's columns, or of the columns that option `columns` names."""
        return log_columns_ddl(parse_read(self.options).columns)

    @without_stack
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch; `schema` is the log's schema or the user's schema."""
        options = self._resolve_read_options(schema, Purpose.BATCH)
        from waltz_spark.datasource.batch_read import WaltzBatchReader  # noqa: PLC0415 - see the module

        return WaltzBatchReader(options, schema)

    @without_stack
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        """Return the reader of a stream; `schema` is the log's schema or the user's schema."""
        from waltz_spark.datasource import stream_read  # noqa: PLC0415 - see the module
        from waltz_spark.spark_version import adapt_stream_reader  # noqa: PLC0415 - see the module

        try:
            options = self._resolve_read_options(schema, Purpose.STREAM)
        except WaltzError as error:
            return adapt_stream_reader(stream_read.FailingStreamReader(error))
        return adapt_stream_reader(stream_read.WaltzStreamReader(options, schema))

    def _resolve_read_options(self, schema: StructType, purpose: Purpose) -> ReadOptions:
        options = self._parse_read_options(schema, purpose)
        if options.change_feed_rules is None:
            return options
        from waltz_spark.datasource.change_feed import resolve_rule_columns  # noqa: PLC0415 - see the module

        return resolve_rule_columns(options, schema)

    def _parse_read_options(self, schema: StructType, purpose: Purpose) -> ReadOptions:
        options = parse_read(self.options, purpose)
        check_log_column_types(schema, options)
        corrupt = next((each for each in schema if each.name == options.corrupt_column), None)
        if corrupt is not None and not isinstance(corrupt.dataType, BinaryType | StringType):
            raise BadRequest(
                f"column {corrupt.name!r}, for payloads that cannot be unpacked: expected "
                f"type string or binary, found {corrupt.dataType.simpleString()}"
            )
        if corrupt is not None and not corrupt.nullable:
            raise BadRequest(
                f"column {corrupt.name!r} is NOT NULL in the schema, but it is null for "
                "every payload that can be unpacked. Hint: declare the column as nullable."
            )
        payload_fields = [field for field in schema.fields if field.name not in options.log_columns]
        if payload_fields and options.data_format is None:
            names = first_names_text([field.name for field in payload_fields], 5)
            raise BadRequest(
                f"the schema has columns that the log does not have ({names}). Hint: to "
                "unpack them from the payload, use option dataFormat=msgpack (or json)."
            )
        if options.data_format is not None and not payload_fields:
            raise BadRequest(
                "option 'dataFormat' needs a schema with the payload's columns. Hint: use "
                ".schema('id long, amount double') with their names and types, or omit the option "
                "and use column 'data'."
            )
        payload = [field.name for field in payload_fields]
        for name in options.required_columns:
            if not columns_matching(name, payload):
                raise BadRequest(
                    "option 'requiredColumns': expected columns of the payload that are in "
                    f"the schema ({', '.join(payload)}), found {name!r}"
                )
        for field in payload_fields:
            check_packed_type(field.name, field.dataType, options.data_format)
            if options.corrupt_payload_mode is CorruptPayloadMode.NULLS:
                check_nullable(field.name, field.dataType, nullable=field.nullable)
            if options.encryption_keys is not None and options.change_feed_rules is None:
                check_nullable(
                    field.name, field.dataType, DECRYPTION_REASON, nullable=field.nullable
                )
        return options

    @without_stack
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        """Return the writer of a batch."""
        if overwrite:
            raise BadRequest(
                "mode 'overwrite' is not supported, because a log keeps every transaction. "
                "Hint: use .mode('append'), or INSERT INTO."
            )
        options = self._parse_write_options(schema)
        from waltz_spark.writer.batch_write import WaltzBatchWriter  # noqa: PLC0415 - see the module

        return WaltzBatchWriter(options, schema)

    @without_stack
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 - Spark's
        """Return the writer of a stream."""
        if overwrite:
            raise BadRequest(
                "outputMode 'complete' is not supported: it writes all rows again in each "
                "micro-batch, but a log keeps every transaction. Hint: use "
                "outputMode('append') or 'update'."
            )
        options = self._parse_write_options(schema)
        from waltz_spark.writer.stream_write import WaltzStreamWriter  # noqa: PLC0415 - see the module

        return WaltzStreamWriter(options, schema)

    def _parse_write_options(self, schema: StructType) -> WriteOptions:
        options = parse_write(self.options)
        duplicates = [name for name, count in Counter(schema.names).items() if count > 1]
        if duplicates:
            raise BadRequest(
                f"two columns have the name {duplicates[0]!r}. Hint: drop or rename one of them."
            )
        if options.data_format is not None:
            from waltz_spark.writer.columns import WRITE_COLUMNS  # noqa: PLC0415 - see the module

            for field in schema:
                if field.name not in WRITE_COLUMNS:
                    check_packed_type(field.name, field.dataType, options.data_format)
        if options.results_path is not None:
            from waltz_spark.writer.results import open_results_directory  # noqa: PLC0415 - see the module

            open_results_directory(options.results_path)
        return options

    def __reduce__(self) -> Any:  # noqa: ANN401 - pickle's own protocol
        return (type(self), (dict(self.options),))
