"""Waltz, a quorum-replicated write-ahead log with optimistic locking: see ARCHITECTURE.md."""

__version__ = "0.2.0"
