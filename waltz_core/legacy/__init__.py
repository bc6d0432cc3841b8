"""The protocols of Waltz 0.13, for its clients and its servers; `storage` implements its files.

`legacy_client.py` adapts a 0.13 client to our server, with `feed_frames.py`: it converts answers to
messages and frames. `legacy_server_link.py` adapts our streams to a 0.13 server, with
`legacy_server_stream.py`, `legacy_server_appends.py` and `legacy_server_rows.py`.
`legacy_server_reads.py` adapts our reads. The package imports neither the server nor the client;
`interfaces.py` declares the interfaces of the client that it needs. docs/compatibility.md describes
what is supported.
"""
