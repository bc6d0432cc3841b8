"""The values of the client library: transactions, locks, callbacks, serializers."""
