"""Connections between processes: TCP, TLS, host names, and open files passed through Unix sockets.

`net.py` opens and accepts the links that carry messages. `tls.py` turns settings into TLS
contexts, and `tls_port.py` is a listening port with them. `tcp.py` asks the kernel whether the
other end is alive, `lookup.py` resolves host names, and `handover.py` passes an open file to
another process of this machine.
"""
