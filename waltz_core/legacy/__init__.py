"""Compatibility with Waltz 0.13 that no other package needs: its clients, and its servers.

`old_client.py` adapts a 0.13 client to our server, with `old_messages.py` and `feed_frames.py`.
`old_server_stream.py`, `old_server_link.py`, `old_server_reads.py` and `old_server_rows.py` adapt
our client to a 0.13 server. docs/compatibility.md has what works.
"""
