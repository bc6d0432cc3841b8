"""The server daemon: connections of clients, links to storages and to other servers, shutdown.

`server_daemon.py` is the process. `host.py` runs the state machine of one partition, `clients.py`
manages the connections of clients, and `storage_links.py` the links to storages.
`failure_detector.py` removes dead servers, and `rebalancer.py` moves partitions between servers.
`preferences.py` decides which partitions this server prefers. `session_open_limit.py` limits how
many store sessions are being opened at a time, and `flow_control.py` limits what clients may send.

`client_id_queue.py` issues client IDs, and `registry_requests.py` changes the registry of
exactly-once writes for clients. `append_times.py` measures the latency of storages, and
`partition_cost.py` the cost of a partition.
`server_in_memory.py` and `log_in_memory.py` are a server without storages, for `MemoryWaltz`.
"""
