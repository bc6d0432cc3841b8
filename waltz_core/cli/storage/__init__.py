"""`waltz-core storage`: run a storage daemon, and administer storages while they run.

`storage_run.py` runs the daemon. `storage_partitions.py`, `storage_scrub.py` and `storage_views.py`
contain the other subcommands, and `storage_target.py` selects the storages for them.
`owner_connection.py` sends requests that normally only the owner of a store session sends.
"""
