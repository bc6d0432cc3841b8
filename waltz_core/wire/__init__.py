"""How bytes become messages, and how both ends agree on a version.

Every TCP port of a cluster speaks frames: one magic byte that names the surface, a 16-bit version,
a 32-bit payload length, the payload. A connection starts with one hello from each side, sent
without waiting for the other; it lists the versions that the side can speak, and the highest one
common to both is spoken from then on. A frame of another surface or version closes the connection.

Surfaces: `H` hello, `L` client and server, `S` server and storage, `A` storage administration.
Versions L 4 and A 0 are those of Waltz 0.13; its S 0 is not spoken (decision 043). L 5 and S 1 are
ours: they add batches, acknowledgements, ranges and the session rules of recovery (type numbers
from 64 up, so that no number of the original can ever collide). L 6 adds authors who
follow what is in flight (decision 017). S 2 tells in which session a storage was engaged last.

`messages.py` is the table: one dataclass for each message, its code, the versions it exists in, and
its fields in wire order; `admin_messages.py` is the same for surface A. `codec.py` derives the
bytes from these tables. `connection.py` is the life of one connection without any I/O: bytes in,
messages and bytes out.
"""
