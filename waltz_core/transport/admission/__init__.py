"""Admission at a listening port: the permissions and limits of peers, and the audit log.

`port_access.py` keeps the newest permissions, and `connection_access.py` applies them to the
requests of one connection. `throttle.py` applies the quotas of the connection's principal.
`port_limits.py` limits what hostile peers can use. `audit_log.py` records administrative and denied
requests.
"""
