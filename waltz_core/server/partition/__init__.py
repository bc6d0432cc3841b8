"""One partition as a server runs it; `served_partition.py` combines the parts.

`proofs.py` answers requests that must not be stale.
"""
