"""`waltz-core storage`: run a storage daemon, and administer storages while they run.

`storage_run.py` runs the daemon. `storage_partitions.py`, `storage_scrub.py` and `storage_views.py`
have the other subcommands; `storage_target.py` selects the storages for them. `owner_connection.py`
sends the requests that only the owner of a session sends.
"""
