"""Connections between processes: TCP, TLS, HTTP, host names, and descriptors over Unix sockets.

`net.py` opens the links that carry messages, with parts in `dialing.py`. `listening.py` accepts
them, and `admission/` decides what a port permits to its peers. `tls.py` turns settings into TLS
contexts, `tls_port.py` is a listening port with TLS, and `client_hello.py` examines the first bytes
of a peer. `port_files.py` opens the files of a daemon's port, again on SIGHUP. `quota_metrics.py`
counts what principals with limits use. `token_source.py` reads the token of a connecting process.
`tcp.py` reads from the kernel whether the peer's host still answers, `dns_lookup.py` looks host
names up, and `descriptor_passing.py` passes an open file to another process on this machine.
`http_port.py` serves HTTP.
"""
