"""`waltz-core access`: the permissions and tokens of principals (decision 048).

`access_grants.py` creates the permissions and changes grants and limits. `access_groups.py` changes
the groups, and `access_tokens.py` the tokens. `access_views.py` shows the permissions and checks a
single one. `access_export.py` copies them to a file and back. `access_change.py` runs every change
with an audit entry, and waits until the daemons use it. `private_files.py` reads and writes files
with secrets.
"""
