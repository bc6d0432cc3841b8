"""The archive of a log: its older part as Parquet objects (docs/decisions/047).

`objects.py` writes the transactions of a range as one object, reads them back to the same bytes,
and verifies them. `manifest.py` lists the objects of a partition, and `store.py` is the interface
to the store. `upload.py` adds a range to an archive: the object and the manifest of an
`manifest_jobs.py`. `file_names.py` has the names of these files. `garbage_collection.py` deletes
those that no manifest lists. `storage_archive.py` does both for a storage, which needs no Parquet
library before.

`reader.py` reads ranges of a partition, in the form in which a storage reads them from its log. It
keeps the batches of an open object in an index, `object_index.py`. `archive_cache.py` is shared by
the readers of all partitions of a process. `archive_check.py` verifies every file of a partition.

`saved_manifest.py` has the files of a manifest in a backup, and `restored_manifest.py` the manifest
of a partition that is restored from them. `pins.py` keeps its objects from being deleted.
"""
