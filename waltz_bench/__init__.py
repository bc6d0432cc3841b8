"""Benchmarks of a cluster, of its parts, and of peers: `waltz-core bench WORKLOAD`.

`command.py` has the table of workloads; docs/performance.md describes what each one measures.
"""
