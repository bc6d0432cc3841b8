"""What an operator is told about a cluster: the findings of the doctor and the checks of `verify`.

`facts.py` is what the probes collected, `diagnosis.py` turns it into findings, and `findings.py`
has the sentence and the command for each. `standing.py` judges one partition. `checks.py` has the
seven checks of `waltz-core cluster verify`.
"""
