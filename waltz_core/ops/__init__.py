"""Diagnosis for operators: the findings of the doctor and the checks of `cluster verify`.

`facts.py` defines the facts that the probes collect, and `diagnosis.py` derives findings from them.
`findings.py` contains the sentence and the command for each finding. `condition.py` determines the
state of one partition. `checks.py` contains the seven checks of `waltz-core cluster verify`.
"""
