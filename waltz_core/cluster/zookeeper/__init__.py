"""Sessions with ZooKeeper: the real one through kazoo, and one in memory for tests.

`zookeeper_session.py` implements `znodes/interface.py` with kazoo, and `kazoo_connection.py`
changes kazoo's connection thread. `zookeeper_in_memory.py` implements the interface for tests and
the simulator. `credentials.py` computes access control lists, and `watchdog.py` ends the session of
a process whose event loop hangs. `startup.py` repeats the steps of a daemon's start while ZooKeeper
does not answer. `follow_znodes.py` handles nodes that cannot be decoded.
"""
