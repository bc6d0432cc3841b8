"""Storage directories for tests of `waltz_core.offline`: written by a storage, then damaged."""

from pathlib import Path
from random import Random

from tests.storage_model import ROOT, ModeledLog
from waltz_core.offline.verify import VerificationResult, verify
from waltz_core.storage.files.format import encode_storage_id
from waltz_sim.world.simulated_disk import SimDisk

PARTITION = 2
FINDINGS_MAX = 1000


def write_to_directory(disk: SimDisk, target: Path) -> Path:
    """Write all files of an in-memory disk to a directory; return it."""
    for path, content in disk.files().items():
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    (target / "waltz-x.id").write_bytes(encode_storage_id(bytes(range(16))))
    return target


def sample_log(segment_bytes_max=900) -> ModeledLog:
    """Return a log of four segments and seven batches, not closed; the marker is at its end."""
    world = ModeledLog(Random(4), segment_bytes_max=segment_bytes_max, bytes_max=60)
    world.control.set_flags(PARTITION, 5)
    world.prepare()
    world.set_mark()
    for counts in ([3, 5], [1], [12, 2], [9, 4]):
        world.append(counts)
        world.sync()
        world.now_ms += 1500
    return world


def sample_storage(target: Path, segment_bytes_max=900) -> tuple[Path, ModeledLog]:
    """Return the same log, closed, in a directory."""
    world = sample_log(segment_bytes_max)
    world.close()
    return write_to_directory(world.disk, target), world


def verify_directory(path: Path, **options) -> VerificationResult:
    """Verify a directory."""
    return verify(path, options.get("partitions"), options.get("limit", FINDINGS_MAX))


def verification_texts(path: Path) -> tuple[list[str], list[str]]:
    """Return the errors and notes of a directory, each with its place."""
    findings = verify_directory(path).findings
    texts = {True: [], False: []}
    for finding in findings.kept_findings:
        where = finding.path if finding.offset is None else f"{finding.path} at {finding.offset}"
        texts[finding.is_error].append(f"{where}: {finding.what}")
    assert not findings.omitted_count
    return texts[True], texts[False]


def flip_byte(path: Path, offset: int, mask: int = 1) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def overwrite_bytes(path: Path, offset: int, content: bytes) -> None:
    """Write other bytes into a file."""
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


def segment_files(directory: Path, suffix: str = ".seg") -> list[Path]:
    """The files of the partition, in order."""
    return sorted((directory / str(PARTITION)).glob(f"*{suffix}"))
