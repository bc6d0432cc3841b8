"""Connections between processes: TCP, TLS, host names, and file descriptors over Unix sockets.

`net.py` opens and accepts the links that carry messages. `tls.py` turns settings into TLS contexts,
and `tls_port.py` is a listening port with them. `port_access.py` determines the principal of a
peer, and `token_place.py` reads the own token. `throttle.py` lets the requests of principals with
limits wait, and `quota_metrics.py` shows what they use. `tcp.py` reads from the kernel whether the peer's
host is alive, `lookup.py` resolves host names, and `handover.py` passes an open file to another
process on this machine.
"""
