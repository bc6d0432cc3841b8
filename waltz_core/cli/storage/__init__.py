"""`waltz-core storage`: run a storage daemon, and administer storages while they run."""
