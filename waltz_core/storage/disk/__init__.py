"""The file system as storages use it: files, descriptors, and pages in the system's memory.

`file_system.py` is the only file of a storage that opens, writes and syncs files.
`descriptors.py` limits how many files are open, and `page_cache.py` limits how much of a file stays
in the page cache.
"""
