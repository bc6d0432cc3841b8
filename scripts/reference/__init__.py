"""The tables of `docs/reference/`, a module for each page, written by `generate_docs.py`.

Each module reads one source in the code. `events.toml` has the meaning of each log event.
"""
