"""Administration: queries and changes of a running cluster, for commands and for the console.

`cluster_probes.py` collects the facts about a cluster, and `lasting_findings.py` the problems that
are not temporary; `waltz_core.ops` derives problems from facts. `replica_changes.py` and
`preference_changes.py` change a cluster, and `change_run.py` records each change in the audit log.
`member_connections.py` has the TLS settings of connections to servers and storages, and
`member_queries.py` sends single requests.
"""
