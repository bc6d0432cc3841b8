"""One partition as a server runs it; `served_partition.py` combines the parts.

`waiting_requests.py` has requests that wait. `linearizable_requests.py` answers requests whose
answers must not be stale.
"""
