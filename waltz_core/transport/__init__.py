"""Connections between processes: TCP, TLS, host names, and file descriptors over Unix sockets.

`net.py` opens the links that carry messages, with parts in `dialing.py`, and `listening.py` accepts
them; `admission/` has what a port permits to its peers. `tls.py` turns settings into TLS contexts,
`tls_port.py` is a listening port with them, and `client_hello.py` examines the first bytes of a
peer. `port_files.py` opens the files of a daemon's port, again on SIGHUP, and `quota_metrics.py`
counts what its principals use. `token_place.py` reads the own token. `tcp.py` reads from the kernel
whether the peer's host is alive, `lookup.py` resolves host names, and `handover.py` passes an open
file to another process on this machine.
"""
