"""The live servers, and the owner of each partition.

`registration.py` has the registered servers and the duties of the leader. `assignment.py` assigns
partitions to servers and replicas to storages. `loads.py` and `balance.py` move partitions by load,
and `reachability.py` excludes servers that their peers cannot reach. `applied_revisions.py` has the
revision of the permissions that each daemon uses, and `issued_ids.py` the counter of client IDs.
"""
