"""What is done with a storage's files while no storage runs: look, count, verify, mend an index.

`waltz-core disk` is its face. From the top: `verify` judges a whole directory, `verify_control` its
control files, `verify_log` one partition; `statistic` counts a segment, `index_repair` makes its
`.idx` anew; `lineage` and `records` walk through `.chn` and `.seg`; `file_findings` is what verify
has to say, `files` the door to files that are only read, `layout` the bytes.

Nothing here uses the storage's own readers. What `waltz_core.storage` writes is read with another
parser and another CRC-32 (crcmod), from the page that describes the bytes: a mistake in the
storage's format code that its own reader would share comes to light here. The one exception is
`index_repair`: it writes, and does that through the storage's door to the disk.
"""
