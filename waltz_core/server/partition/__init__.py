"""One partition as a server runs it; `served_partition.py` combines the parts.

`waiting_requests.py` keeps requests that wait. `linearizable_requests.py` delays requests whose
answers must not be stale until a quorum has confirmed the session.
"""
