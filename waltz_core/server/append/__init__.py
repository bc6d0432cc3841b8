"""The append pipeline of a partition: queue, check, validate, encode, submit, answer.

`pipeline.py` is the pipeline. `mounts.py` tracks which connections may append, and `admission.py`
checks each append against these mounts. `lanes.py` and `large_batch_throttle.py` schedule appends
fairly. `in_flight.py` keeps the batches in flight, `completions.py` and `answers.py` answer
requests, and `outcomes.py` declares the effects of the pipeline. `recent_rejections.py` keeps the
newest rejections.
"""
