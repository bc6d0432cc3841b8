"""The wire protocol: frames, messages, and the negotiation of versions.

Every TCP port of a cluster uses frames: one magic byte that names the protocol, a 16-bit version, a
32-bit payload length, the payload. A connection starts with one hello from each side, sent without
waiting for the other; it lists the side's versions, and both sides use the highest common one from
then on. A frame of another protocol or version closes the connection.

WireProtocols: `H` hello, `L` client and server, `S` server and storage, `A` storage administration.
Versions L 4 and A 0 are those of Waltz 0.13; its S 0 is not supported (decision 043). L 5 and S 1
add batches, acknowledgements, ranges and the session rules of recovery (type numbers from 64 up, so
that none collides with one of 0.13). L 6 adds pipelined dependent appends (decision 017). S 2
reports the session in which a storage was last engaged. S 3 archives ranges (decision 047). L 8,
S 4 and A 2 authenticate a connection by a token (decision 048).

`messages.py` is the table: one dataclass for each message, its code, its versions, and its fields
in wire order; `admin_messages.py` is the same for protocol A. `codec.py` derives the bytes from
these tables, with the layouts of `fields.py`. `connection.py` is one connection without any I/O:
bytes in, messages and bytes out. `authentication.py` has the exchange that states the principal of
a connection. `record_locations.py` has the positions of records in files.
"""
