"""The command `waltz-core`: `main.py` contains the table of commands, the other files subcommands.

A subcommand is a function or a coroutine with the decorator `@subcommand`. The decorators below
`@subcommand` declare its options with click; `shared_options.py` declares the options that several
subcommands share. A subcommand receives its options as keyword arguments and returns the exit code:
0 done, 1 an error that the command explains in one sentence, 2 wrong usage, 130 interrupted.

Each larger group of subcommands has a folder. `local_command.py`, `zookeeper_command.py`,
`config_command.py` and `bench_command.py` are small groups. `subcommands.py` adapts click,
`progress.py` shows a progress bar with rich, and `output.py` prints tables or JSON.
`daemon_command.py` runs daemons, and `change_commands.py` runs commands that change a cluster.
`http_pages.py` reads the HTTP pages of daemons. The queries and changes themselves are in
`waltz_core/administration`, because the console of the gateway uses them, too.
"""
