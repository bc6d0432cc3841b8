"""One partition as a server runs it; `served_partition.py` combines the parts.

`waiting_requests.py` has requests that wait, and `linearizable_requests.py` gives answers that must
not be stale.
"""
