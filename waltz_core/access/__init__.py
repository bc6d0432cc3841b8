"""Access control: the permissions that messages require, and the principals that have them.

Decision 048 has the reasons.

`requirements.py` defines the verbs, and how each message class declares its requirement.
`principals.py` maps a certificate to a principal, `tokens.py` has the secret of a token, and
`permissions.py` has the permissions as ZooKeeper stores them. `grants.py` decides whether a
principal meets a requirement; `transport/admission/port_access.py` uses it for each request.
`quotas.py` enforces the limits of principals. `client_ids.py` has the proof that a client ID
belongs to a principal. `permission_changes.py` computes the permissions after a change, for
commands.
"""
