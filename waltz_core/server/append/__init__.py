"""The append pipeline of a partition: queue, judge, encode, submit, answer.

`pipeline.py` is the pipeline. `mounts.py` decides which connections may append. `lanes.py` and
`pace.py` share the time between clients. `flights.py` are the batches in flight, `endings.py` and
`answers.py` how requests end, and `outcomes.py` what the pipeline asks of its partition.
"""
