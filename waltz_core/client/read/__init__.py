"""Reads of a client: ranges of transactions, feeds, and the data of both.

`requests.py` sends queries to the owner of a partition. `ranges.py` fetches ranges,
`local_reader.py` reads them from the files of a storage on this machine, and `archive_ranges.py`
reads them directly from the archive. `catch_up.py` and `feed_delivery.py` pass the feed to the
application, with the data that `data_cache.py` fetches. `start_times.py` finds where a read by time
begins. `reported_rejections.py` decodes the newest rejections of a partition.
"""
