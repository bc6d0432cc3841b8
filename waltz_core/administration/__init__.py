"""Administration: queries and changes of a running cluster, for commands and for the console.

`cluster_probes.py` collects the facts about a cluster, and `waltz_core.ops` derives problems from
these facts. `lasting_findings.py` omits temporary problems. `replica_changes.py` and
`preference_changes.py` change a cluster, and `change_run.py` records each change in the audit log.
`member_connections.py` selects the TLS settings for connections to servers and storages, and
`member_queries.py` sends single requests.
"""
