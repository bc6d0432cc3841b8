"""`waltz-core server`: run a server daemon, list servers, and choose their partitions.

`server_run.py` runs the daemon, and `server_command.py` lists servers.
"""
