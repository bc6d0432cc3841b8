"""Reading: ranges of transactions, feeds as they reach the application, and the data of both.

`requests.py` asks the owner of a partition. `ranges.py` fetches ranges, and `nearby.py` reads them
from a storage of this machine. `catch_up.py` and `feed_delivery.py` bring the feed to the
application, with the data that `data_cache.py` fetched.
"""
