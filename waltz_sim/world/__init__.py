"""The simulated environment: time, randomness, network, disks and processes.

`world.py` has virtual time and the heap of planned actions. `process.py` has the processes, and
`network.py` has the links between them. `simulated_disk.py` is a disk of files (`inode.py`) that
can lose unsynced data. `crash.py` enumerates every state that a crash may leave. `event_loop.py`
runs coroutines in virtual time.
"""
