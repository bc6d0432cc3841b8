"""Access control: the permissions that messages require, and the principals that have them.

Decision 048 describes the design; "AC 1" and so on are its rules.

`requirements.py` defines the verbs, and how each message class declares its requirement.
`principals.py` maps a certificate to a principal, and `tokens.py` parses tokens. `permissions.py`
declares the permissions that ZooKeeper stores. `grants.py` decides whether a principal meets a
requirement; `transport/admission/port_access.py` checks this for each request. `quotas.py` enforces
the limits of principals. `client_ids.py` proves that a client ID belongs to a principal.
`permission_changes.py` computes the permissions after a change, for commands.
"""
