"""The command `waltz-core`: one file for each noun, each with its verbs.

A file of a noun has `add(commands)`, which declares its verbs to argparse, and one function for
each verb that takes the parsed arguments and returns the exit code. Exit codes: 0 done, 1 an error
that the command explains in one sentence, 2 wrong usage, 130 interrupted.
"""
