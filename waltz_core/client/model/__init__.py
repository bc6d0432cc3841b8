"""The values of the client library: transactions, locks, callbacks, serializers.

`transaction.py` defines transactions, locks and contexts, `decorator.py` turns a function into a
context, and `predecessors.py` defines the transactions in flight on which a context depends.
`callbacks.py` defines the callbacks of a feed. `serializers.py` and `compression.py` convert values
to data, and `payloads.py` encrypts and decrypts data.
"""
