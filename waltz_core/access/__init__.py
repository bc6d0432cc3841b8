"""Access control: what the principal of a connection must be permitted (decision 048).

`requirements.py` has the verbs, and the words in which each message declares its requirement.
"""
