"""The lag and the metrics of streaming queries, in the user's process.

`lag.py` computes the lag of a query from Spark's progress reports. `query_metrics.py` exports the
lag and the counts of written rows to Prometheus.
"""
