"""Reading: the code of `spark.read.format("waltz")` on the driver and on executors.

`source.py` is the data source that Spark creates. `batch_read.py` and `stream_read.py` plan tasks
from marks, with `start_offsets.py` for the first ones; `fetch.py` reads a range of IDs in a task,
and `archive_read.py` plans and reads the part of it that the archive has. `feed_read.py` reads a
change feed in a task: `change_feed.py` makes its rows from transactions and from the state before
them, and `feed_state.py` has this state in SQLite.
"""
