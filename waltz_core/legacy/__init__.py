"""The protocols of Waltz 0.13, for its clients and its servers; `storage` has its files.

`old_client.py` adapts a 0.13 client to our server, with `feed_frames.py`: answers in, messages and
frames out. `old_server_link.py` adapts our streams to a 0.13 server, with `old_server_stream.py`,
`old_server_appends.py` and `old_server_rows.py`; `old_server_reads.py` adapts our reads. The
package imports neither the server nor the client; `interfaces.py` declares what it needs from the
client. docs/compatibility.md describes what works.
"""
