"""The command `waltz-core`: `main.py` has the table of commands, the other files their subcommands.

A subcommand is a function or a coroutine under `@subcommand`. The decorators below `@subcommand`
declare its options with click; `shared_options.py` has the options that several subcommands share.
A subcommand receives its options as keywords and returns the exit code: 0 done, 1 an error that the
command explains in one sentence, 2 wrong usage, 130 interrupted.

The folders contain the subcommands of larger groups. `local_command.py`, `zookeeper_command.py`,
`config_command.py` and `bench_command.py` contain those of small groups. `subcommands.py` and
`progress.py` adapt click and rich, and `output.py` prints tables or JSON. `daemon_command.py` runs
daemons, and `change_commands.py` runs commands that change a cluster. `http_pages.py` reads the
HTTP pages of daemons. `waltz_core/administration` has the queries and changes themselves, because
the console of the gateway needs them, too.
"""
