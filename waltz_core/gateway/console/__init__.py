"""The console: web pages of the gateway that show and administer a cluster (decision 069).

`console_routes.py` defines the routes, and `static_pages.py` serves the files in `pages/`.
`cluster_view.py` returns the state of the cluster, which `snapshot_reader.py` reads from ZooKeeper.
`administrators.py` checks the permissions that neither a server nor a storage checks.
`change_kinds.py` is the table of all changes, and `running_changes.py` runs them.

`transaction_pages.py` reads transactions, and `payload_text.py` decodes their payloads, with
`message_pack_text.py` and `hex_dump.py`. `rejection_rows.py` reads the latest rejections.
"""
