"""`waltz-core access`: the permissions and tokens of principals (decision 048).

`access_grants.py` creates the permissions and changes grants and limits. `access_groups.py` changes
groups, and `access_tokens.py` tokens. `access_views.py` shows the permissions, and checks whether a
principal has a permission. `access_export.py` copies the permissions to a file and back.
`access_change.py` writes an audit entry for each change, and waits until the daemons use it.
`private_files.py` reads and writes files with secrets.
"""
