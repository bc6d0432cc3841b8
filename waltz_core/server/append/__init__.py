"""The append pipeline of a partition: queue, check, validate, encode, submit, answer.

`pipeline.py` is the pipeline. `mounts.py` tracks which connections may append, and `admission.py`
checks each append against it. `lanes.py` and `pace.py` schedule appends fairly. `in_flight.py`
keeps the batches in flight, `completions.py` and `answers.py` end requests, and `outcomes.py` are
the effects of the pipeline.
"""
