"""Reading: ranges of transactions, feeds, and the data of both.

`requests.py` sends queries to the owner of a partition. `ranges.py` fetches ranges, and
`local_reader.py` reads them from the files of a storage on this machine. `catch_up.py` and
`feed_delivery.py` pass the feed to the application, with the data that `data_cache.py` fetches.
`archive_ranges.py` reads ranges directly from the archive. `start_times.py` finds where a read by
time begins.
"""
