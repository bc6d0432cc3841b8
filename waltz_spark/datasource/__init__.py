"""Reading: the code of `spark.read.format("waltz")` on the driver and on executors.

`source.py` is the data source that Spark creates. `batch_read.py` and `stream_read.py` plan tasks
from high-water marks; `start_offsets.py` determines the first ones. In a task, `fetch.py` reads a
range of IDs. `archive_read.py` plans and reads the part of the range that is archived.
`feed_read.py` reads a change feed in a task: `change_feed.py` derives the rows of the feed from
transactions and from the preceding state, and `feed_state.py` stores this state in SQLite.
"""
