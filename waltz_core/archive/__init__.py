"""The archive of a log: its older part as Parquet objects (docs/decisions/047).

`objects.py` writes the transactions of a range as one object, rebuilds the bytes of the records
from the object, and verifies an object. `manifest.py` lists the objects of a partition, and
`store.py` is the interface to the object store. `manifest_jobs.py` declares jobs that write a
manifest, and `upload.py` executes them: it adds a range to an archive, or expires objects.
`file_names.py` has the names of all files. `garbage_collection.py` deletes files that no manifest
lists. `storage_archive.py` is the archive of a storage process; it imports the Parquet library only
if an archive is configured.

`reader.py` reads ranges of a partition, in the form in which a storage reads them from its log. For
each open object, it keeps an index of the object's batches (`object_index.py`). All readers of a
process share one cache (`archive_cache.py`). `archive_check.py` verifies every file of a partition.

`saved_manifest.py` stores the files of a manifest in a backup. `restored_manifest.py` writes the
manifest of a partition that is restored from a backup. `pins.py` prevents the deletion of objects
that a restored cluster uses.
"""
