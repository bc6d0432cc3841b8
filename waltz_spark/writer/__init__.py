"""Writing: one row is one transaction, refused or committed, and every outcome is told.

A task sends its rows in append batches over one client, several in flight. The log answers each
row: committed with its ID, refused by a lock with the conflicting ID, or not taken (the session
broke, a server moved): the last are sent again, in order, because they are known not to be in
the log. A task that Spark runs again after a failure sends its rows again: a write is at least once
for rows without locks, and a write lock makes the second copy a refusal.
"""
