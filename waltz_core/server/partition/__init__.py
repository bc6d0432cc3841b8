"""One partition as a server runs it; `served_partition.py` combines the parts.

`waiting_requests.py` keeps requests until they can be answered, and `proofs.py` answers those that
must not be stale.
"""
