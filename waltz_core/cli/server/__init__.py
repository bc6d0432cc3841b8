"""`waltz-core server`: run a server daemon, and choose which partitions it owns."""
