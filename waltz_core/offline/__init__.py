"""Offline tools for a storage's files while no storage runs: dump, count, verify, rebuild an index.

`waltz-core disk` is the command for them. `verify` checks a whole directory, `verify_control` its
control files, `verify_log` one partition, `verify_segment` one segment; `statistic` counts a
segment, `index_repair` rebuilds its `.idx`; `lineage` and `records` walk through `.chn` and `.seg`;
`file_findings` collects the findings, `files` opens files for reading only, and `layout` decodes
the bytes.

Nothing here uses the storage's own readers. A second parser with another CRC-32 (crcmod), written
from the description of the bytes, reads what `waltz_core.storage` writes: so it finds a mistake in
the storage's format code that its own reader would share. The one exception is `index_repair`: it
writes, through the storage's interface to the disk.
"""
