"""The command `waltz-core`: `main.py` has the table of commands, the other files their verbs.

A verb is a function or a coroutine under `@verb`. The decorators below it declare its options with
click; `shared_options.py` has those of several verbs. A verb gets its options as keywords and
returns the exit code: 0 done, 1 an error that the command explains in one sentence, 2 wrong usage,
130 interrupted.
"""
