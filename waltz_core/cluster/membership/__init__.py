"""The live servers, and the owner of each partition.

`registration.py` registers servers and does the work of the leader. `assignment.py` assigns
partitions to servers and replicas to storages. `loads.py` measures the load of partitions, and
`balance.py` plans moves by load. `reachability.py` excludes servers to which no other server can
connect. `applied_revisions.py` publishes the revision of the permissions that each daemon uses, and
`issued_ids.py` allocates client IDs.
"""
