"""`waltz-core server`: run a server daemon, list servers, choose their partitions."""
