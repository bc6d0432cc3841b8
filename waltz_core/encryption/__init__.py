"""Payload encryption in clients and in Spark: the log stores envelopes instead of payloads.

`keys.py` gets keys by their IDs (`key_ids.py`), from a directory or from a function of the
application. `envelopes.py` encrypts and decrypts payloads, single ones and Arrow columns of them.
Servers, storages and the archive do not know that a payload is encrypted.
"""
