"""Sessions with ZooKeeper: the real one through kazoo, and one in memory for tests.

`zookeeper_session.py` implements `znodes/interface.py` with kazoo, over the connection thread of
`kazoo_connection.py`; `zookeeper_in_memory.py` implements it for tests and the simulator.
`credentials.py` has the access control lists, `watchdog.py` ends the session of a process whose
event loop hangs, and `startup.py` retries while a daemon starts. `follow_znodes.py`
handles nodes that cannot be decoded.
"""
