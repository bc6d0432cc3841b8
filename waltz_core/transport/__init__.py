"""Connections between processes: TCP, TLS, HTTP, DNS, and descriptors over Unix sockets.

`net.py` opens connections and defines the links that carry messages; `dialing.py` has parts of
opening a connection. `listening.py` accepts links, and `admission/` decides which requests a port
accepts from a peer. `http_port.py` serves HTTP.

`tls.py` turns settings into TLS contexts, `tls_port.py` is a listening port with TLS, and
`client_hello.py` examines the first bytes that a peer sends. `port_files.py` opens the files of a
daemon's port, and opens them again on SIGHUP. `token_source.py` reads the token that a dialing
process presents. `quota_metrics.py` publishes metrics of the principals with limits.

`tcp.py` reads from the kernel whether the peer's host still answers. `dns_lookup.py` resolves host
names. `descriptor_passing.py` passes an open file to another process on this machine.
"""
