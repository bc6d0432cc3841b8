"""The values of the client library: transactions, locks, callbacks, serializers.

`transaction.py` has transactions, locks and contexts, `decorator.py` turns a function into a
context, and `predecessors.py` has the transactions in flight that a context depends on.
`callbacks.py` has the callbacks of a feed. `serializers.py` and `compression.py` convert values to
data, and `payloads.py` encrypts and decrypts data.
"""
