"""The command `waltz-core`: `main.py` has the table of commands, the other files their verbs.

A verb is a function or a coroutine under `@verb`. The decorators below it declare its options with
click, those of several verbs in `shared_options.py`; it gets them as keywords and returns the exit
code. Exit codes: 0 done, 1 an error that the command explains in one sentence, 2 wrong usage,
130 interrupted.
"""
