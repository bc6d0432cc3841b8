"""Fault injection: `kinds` lists all kinds of faults, and the other files implement them.

These files are `archive_faults.py`, `disk_faults.py`, `network_faults.py`, `process_faults.py` and
`zookeeper_faults.py`, with the helpers of `injection.py`. A new kind must also be added to
`LATER_KINDS` in `waltz_sim/schedule.py`. If the kind is missing there, all earlier seeds get other
schedules.
"""
