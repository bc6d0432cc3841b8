"""Imports of `waltz_core.records.arrow_buffers`; test_batches.py tests the arrays."""

import subprocess
import sys


def test_neither_daemons_nor_archives_nor_read_tasks_import_pandas():
    code = """if True:
        import io
        import sys
        import waltz_core.server.process.server_daemon
        import waltz_core.storage.process.storage_daemon
        from tests.unit.records.test_raw_records import run_of
        from waltz_core.records.batches import READ_SCHEMA, range_to_arrow
        records, lengths = run_of([b"", b"data"])
        made = range_to_arrow(records, lengths, [(0, 0, 5)], READ_SCHEMA.names, partition_id=0)
        made[0].validate(full=True)
        from tests.archived_log import make_batches, encode_object
        from waltz_core.archive.objects import ArchiveObject
        log = make_batches(0, sizes=(3, 4))
        assert list(ArchiveObject(io.BytesIO(encode_object(*log)), "o").verify()) == log[1]
        sys.exit('pandas' in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
