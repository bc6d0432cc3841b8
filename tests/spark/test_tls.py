"""Spark with a cluster that uses TLS: only the connect string differs."""

from pathlib import Path

from pyspark.sql import SparkSession

from tests.certificates import create_certificates
from waltz_core.config import render_toml
from waltz_core.local import running_cluster


def test_the_connect_string_makes_spark_use_tls(spark: SparkSession, tmp_path: Path):
    certificates = create_certificates(tmp_path)
    file = tmp_path / "tls.toml"
    file.write_text(render_toml("tls", certificates.settings))
    rows = spark.range(3_000).selectExpr("CAST(CAST(id AS STRING) AS BINARY) AS data")
    with running_cluster(tmp_path / "local", tls=file) as cluster:
        without_options = cluster.connect.partition("?")[0]
        # With a certificate, which storages require, and without one, from servers only.
        for number, words in enumerate((str(file), certificates.authorities), 1):
            connect = f"{without_options}?tls={words}"
            rows.write.format("waltz").mode("append").save(connect)
            assert spark.read.format("waltz").load(connect).count() == number * 3_000
