"""Diagnosis for operators: the findings of the doctor and the checks of `cluster verify`.

`facts.py` has the facts that the probes collected, `diagnosis.py` turns them into findings, and
`findings.py` has the sentence and the command for each. `condition.py` determines the state of one
partition. `checks.py` has the seven checks of `waltz-core cluster verify`.
"""
