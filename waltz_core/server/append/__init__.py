"""The append pipeline of a partition: queue, check, judge, encode, submit, answer.

`pipeline.py` is the pipeline. `mounts.py` knows which connections may append, and `admission.py`
checks each append against it. `lanes.py` and `pace.py` share the time between clients. `flights.py`
are the batches in flight, `endings.py` and `answers.py` how requests end, and `outcomes.py` what
the pipeline asks of its partition.
"""
