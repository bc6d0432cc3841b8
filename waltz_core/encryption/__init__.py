"""Payload encryption in clients and in Spark: the log stores envelopes instead of payloads.

`keys.py` loads keys by their IDs (`key_ids.py`), from a directory or from a function of the
application. `envelopes.py` encrypts and decrypts single payloads and Arrow columns of payloads.
Servers, storages and the archive treat an encrypted payload like any other payload.
"""
