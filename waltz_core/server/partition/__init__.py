"""One partition as a server runs it; `served_partition.py` combines the parts.

`waiting_requests.py` keeps requests that wait. If an answer must not be stale,
`linearizable_requests.py` delays the request until a quorum has confirmed the session.
"""
