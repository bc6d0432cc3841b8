"""`waltz-core server`: run a server daemon, list servers, choose their partitions.

`server_run.py` is the daemon, `server_command.py` lists servers.
"""
