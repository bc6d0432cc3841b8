"""Admission at a listening port: the permissions and limits of peers, and the audit log.

`port_access.py` has the newest permissions, and `connection_access.py` applies them to the requests
of one connection. `throttle.py` applies the quotas of the connection's principal. `port_limits.py`
has the limits against hostile peers. `audit_log.py` records administrative and denied requests.
"""
