"""`waltz-core doctor`: probe a cluster and print what is wrong, with commands to repair it.

`doctor_probes.py` gathers facts, `waltz_core.ops` derives the findings, `doctor_command.py` prints
them.
"""
