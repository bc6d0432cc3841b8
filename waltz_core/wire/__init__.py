"""The wire protocol: frames, messages, and the negotiation of versions.

Every TCP port of a cluster uses frames. A frame consists of one magic byte that names the protocol,
a 16-bit version, a 32-bit payload length, and the payload. At the start of a connection, each side
sends one hello, without waiting for the other side. The hello lists the versions that its sender
supports, and both sides then use the highest common version. If a frame has another protocol or
version, the connection is closed.

The protocols are: `H` hello, `L` client and server, `S` server and storage, `A` storage
administration. Versions L 4 and A 0 are those of Waltz 0.13; S 0 of Waltz 0.13 is not supported
(decision 043). The type numbers of all later messages start at 64, so they never collide with those
of 0.13. Later versions add:
    - L 5 and S 1: batches, acknowledgements, ranges, and the session rules of recovery
    - L 6: pipelined dependent appends (decision 017)
    - S 2: a storage reports the session in which it was last engaged
    - S 3: archived ranges (decision 047)
    - L 8, S 4 and A 2: authentication of a connection by a token (decision 048)
    - L 9: a server reports the newest rejections of a partition

`messages.py` is the table of the messages: one dataclass per message, with its code, its versions,
and its fields in wire order. `admin_messages.py` is the same table for protocol A. `codec.py`
encodes and decodes messages according to these tables, with the layouts of `fields.py`.
`connection.py` implements one connection without any I/O: it converts bytes to messages, and
messages to bytes. `authentication.py` defines the exchange that establishes the principal of a
connection. `record_locations.py` describes the positions of records in files.
`append_ids.py` writes the IDs of appends as text for log lines.
"""
