"""One partition as a server runs it: `served_partition.py` combines appends, mounts, feeds and reads.

`proofs.py` answers requests that must not be stale.
"""
