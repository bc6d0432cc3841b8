"""`waltz-core doctor`: query a cluster and report its problems, with commands that repair them.

`waltz_core.administration` gathers the facts, `waltz_core.ops` derives the findings from them, and
`doctor_command.py` prints the findings.
"""
