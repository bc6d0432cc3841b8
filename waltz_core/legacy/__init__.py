"""The protocols of Waltz 0.13, for its clients and its servers.

For 0.13 clients at our server: `legacy_client.py` converts answers to messages that these clients
understand, and `feed_frames.py` encodes the feed.

For our client at a 0.13 server: `legacy_server_link.py` adapts the streams, with
`legacy_server_stream.py`, `legacy_server_appends.py` and `legacy_server_rows.py`.
`legacy_server_reads.py` adapts the reads.

The package imports neither the server nor the client. `interfaces.py` declares the interfaces of
the client that the package needs. The files of Waltz 0.13 are implemented in `storage`.
docs/compatibility.md describes which programs of Waltz 0.13 are supported.
"""
