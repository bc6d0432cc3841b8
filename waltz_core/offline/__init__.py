"""Offline tools for the files of a stopped storage: dump, count, verify, rebuild an index.

The command is `waltz-core disk`. `verify` checks a complete directory, `verify_control` its control
files, `verify_log` one partition, and `verify_segment` one segment. `statistic` counts the content
of a segment, and `index_repair` rebuilds its `.idx` file. `lineage` iterates over the entries of
`.chn`, and `records` over the records of `.seg`. `file_findings` collects the findings, `files`
opens files for reading only, and `layout` decodes the bytes.

This package reads the files that `waltz_core.storage` writes, but does not use the code of that
package. It is a second parser with another CRC-32 (crcmod), written from the description of the
bytes. The reason: if the storage's format code has a mistake, the storage's own reader repeats the
mistake, and cannot detect it. The one exception is `index_repair`, which writes through the
storage's interface to the disk.
"""
