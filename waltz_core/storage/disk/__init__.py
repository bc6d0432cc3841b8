"""The file system as storages use it: files, descriptors, and pages in the page cache.

`file_system.py` is the only file of a storage that opens, writes and syncs files. `descriptors.py`
limits the number of open files, and `page_cache.py` limits the bytes of a file that stay in the
page cache.
"""
