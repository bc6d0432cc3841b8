"""Waltz: a quorum-replicated write-ahead log with optimistic locking. Start with ARCHITECTURE.md."""

__version__ = "0.1.0"
