"""Repeats reads of the archive that have found damage, so that the doctor notices a repair.

Each round repeats one read for each different error, with the manifest of the present session. An
error names the damaged file. So if the read succeeds, the file was repaired, and the same error is
cleared for all reads.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Final

from waltz_core.archive.storage_archive import StorageArchive
from waltz_core.errors import WaltzError
from waltz_core.records.record import PartitionId
from waltz_core.storage.service.service import StorageService
from waltz_core.wire.messages import SetArchived

RECHECK_S: Final = 30.0


async def recheck_forever(
    access: StorageArchive, machine: StorageService, threads: Executor
) -> None:
    """Repeat the reads every `RECHECK_S`; a call that hangs delays only later reads."""
    while True:
        await asyncio.sleep(RECHECK_S)
        await recheck(access, machine.archived_marks, threads)


async def recheck(
    access: StorageArchive, marks: Mapping[PartitionId, SetArchived], threads: Executor
) -> None:
    """Repeat the reads of partitions that have a session; ignore an unavailable store."""
    loop = asyncio.get_running_loop()
    for location in access.damaged_locations:
        partition_id, first = location
        archived_mark = marks.get(PartitionId(partition_id))
        if archived_mark is None or first > archived_mark.last:
            continue
        read = partial(
            access.find_damage_at, location, archived_mark.manifest, archived_mark.manifest_crc
        )
        try:
            damage = await loop.run_in_executor(threads, read)
        except WaltzError:
            continue
        access.note_recheck_result(location, damage)
