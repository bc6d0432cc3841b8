"""Fault injection: `kinds` lists all faults, the other files implement them.

They are `archive_faults.py`, `disk_faults.py`, `network_faults.py`, `process_faults.py` and
`zookeeper_faults.py`, with the helpers of `injection.py`. A new kind also belongs into
`LATER_KINDS` of `waltz_sim/schedule.py`: otherwise all earlier seeds get other schedules.
"""
