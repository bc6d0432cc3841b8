"""Connections between processes: TCP, TLS, host names, and file descriptors over Unix sockets.

`net.py` opens and accepts the links that carry messages, with parts in `dialing.py`, and
`port_limits.py` has the limits of a port against hostile peers. `tls.py` turns settings into TLS
contexts, and `tls_port.py` is a listening port with them. `port_access.py` determines the principal
of a peer, `throttle.py` applies its quotas, `quota_metrics.py` counts them, and `audit_log.py`
writes what peers did. `token_place.py` reads the own token. `port_files.py` opens the files of a
daemon's port, again on SIGHUP. `tcp.py` reads from the kernel whether the peer's host is alive,
`lookup.py` resolves host names, and `handover.py` passes an open file to another process on this
machine.
"""
