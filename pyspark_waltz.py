"""PySpark finds `format("waltz")` here by the module's name; everything else is in `waltz_spark`.

It must never raise: one broken `pyspark_*` module hides every Python data source on the machine.
"""

try:
    from waltz_spark.datasource.source import WaltzDataSource as DefaultSource
except Exception:  # noqa: BLE001 - whatever is missing, other data sources must still be found
    __all__: list[str] = []
else:
    __all__ = ["DefaultSource"]
