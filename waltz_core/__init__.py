"""Waltz, a quorum-replicated write-ahead log with optimistic locking: see ARCHITECTURE.md."""

__version__ = "0.1.0"
