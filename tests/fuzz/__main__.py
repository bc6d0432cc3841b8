"""The fuzzer: feeds decoders changed and random bytes, under limits of memory and time.

    python -m tests.fuzz --seconds 600                       # all decoders, 600 s in total python
    -m tests.fuzz --seconds 600 --decoder hello       # one decoder; may be repeated python -m
    tests.fuzz --decoder hello --atheris           # guided by coverage, until ctrl-C python -m
    tests.fuzz --decoder hello --input FILE        # one input again

Each decoder runs in a separate process. The fuzzer prints each defect with its location and its
bytes, and stores the shortest input for each location in `tests/fuzz/corpus`. The exit code is then
1.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from mmap import mmap
from pathlib import Path
from random import Random, SystemRandom
from types import FunctionType

from tests.fuzz.decoder import CORPUS, ROOT, Decoder, Defect
from tests.fuzz.decoders import BY_NAME, DECODERS
from tests.fuzz.limits import check_limited, limit_memory
from tests.fuzz.mutations import BYTES_MAX, draw_input, with_extremes

# After this time, the parent process ends a decoder that waits without using the CPU, or in C.
PATIENCE_S = 120.0
SEED_BYTES_MAX = 4_096
SEEDS_KEPT = 3


def print_line(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201 - the person at the terminal


class LastInput:
    """The input that a process works on, in a file that outlives it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap(file.fileno(), 0)

    def write(self, data: bytes) -> None:
        self._map[: 4 + len(data)] = len(data).to_bytes(4, "big") + data

    @staticmethod
    def read(path: Path) -> bytes:
        data = path.read_bytes()
        return data[4 : 4 + int.from_bytes(data[:4], "big")]


# ---------------------------------------------------------------------------------------------
# the process that runs decoders


def prepare(decoders: Iterable[Decoder]) -> None:
    """Load the modules that decoders need, then limit the memory of this process."""
    warnings.simplefilter("error")
    for decoder in decoders:
        for data in decoder.all_seeds()[:10]:
            try:
                decoder.check(data)
            except Defect:
                continue  # the run under the limits finds the defect again
    limit_memory()


def report(defect: Defect) -> None:
    print_line(
        json.dumps(
            {
                "decoder": defect.decoder,
                "description": defect.description,
                "location": defect.location,
                "data": defect.data.hex(),
            }
        )
    )


def random_inputs(decoder: Decoder, seed: int, seconds: float) -> Iterator[bytes]:
    """Yield the stored inputs, then random inputs for the given time."""
    yield from decoder.corpus().values()
    rng, seeds = Random(seed), decoder.all_seeds()
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        yield draw_input(rng, seeds, decoder.words)


def extreme_inputs(decoder: Decoder) -> Iterator[bytes]:
    """Yield the stored inputs, then inputs with huge numbers; each call yields the same inputs."""
    yield from decoder.corpus().values()
    found = [
        with_extreme
        for seed in sorted(decoder.all_seeds(), key=len)[-3:]
        for with_extreme in with_extremes(seed, decoder.words)
    ]
    count = 2 * decoder.examples
    yield from Random(decoder.name).sample(found, min(count, len(found)))


def work(arguments: argparse.Namespace) -> None:
    """Run decoders in this process; print each defect, and in the end the number of inputs."""
    decoders = [BY_NAME[each] for each in arguments.decoder] if arguments.decoder else DECODERS
    last = LastInput(arguments.last) if arguments.last else None
    prepare(decoders)
    count = 0
    for decoder in decoders:
        inputs = (
            extreme_inputs(decoder)
            if arguments.extremes
            else random_inputs(decoder, arguments.seed, arguments.seconds)
        )
        for data in inputs:
            if last is not None:
                last.write(data)
            count += 1
            try:
                check_limited(decoder, data)
            except Defect as defect:
                report(defect)
    print_line(json.dumps({"count": count}))


# ---------------------------------------------------------------------------------------------
# the process at the terminal


def run(decoder: Decoder, seconds: float, seed: int) -> tuple[int, list[Defect]]:
    """Run a decoder in a separate process; return the number of inputs, and the defects."""
    with tempfile.NamedTemporaryFile(prefix="waltz-fuzz-") as file:
        file.truncate(4 + BYTES_MAX)
        last = Path(file.name)
        command = [sys.executable, "-m", "tests.fuzz", "--worker", "--decoder", decoder.name]
        command += ["--seconds", str(seconds), "--seed", str(seed), "--last", str(last)]
        try:
            result = subprocess.run(
                command,
                cwd=ROOT,
                check=False,
                capture_output=True,
                text=True,
                timeout=seconds + PATIENCE_S,
            )
        except subprocess.TimeoutExpired:
            return 0, [Defect(decoder.name, LastInput.read(last), "does not end", "?")]
        count, defects = parsed(result.stdout)
        if result.returncode:
            error = result.stderr.strip().rpartition("\n")[2]
            description = f"ended the process, code {result.returncode}: {error:.300}"
            defects.append(Defect(decoder.name, LastInput.read(last), description, "?"))
        return count, defects


def parsed(output: str) -> tuple[int, list[Defect]]:
    """Return the defects printed by `work`: for each location, the one with the shortest input."""
    count, found = 0, {}
    for line in output.splitlines():
        values = json.loads(line)
        if "count" in values:
            count = values["count"]
            continue
        data = bytes.fromhex(values["data"])
        defect = Defect(values["decoder"], data, values["description"], values["location"])
        key = (defect.decoder, defect.location, defect.description.partition(":")[0])
        if key not in found or len(data) < len(found[key].data):
            found[key] = defect
    return count, list(found.values())


def keep(name: str, data: bytes, kind: str) -> Path:
    """Add an input to the corpus; return its file."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(each.stem.rpartition("-")[2]) for each in folder.glob(f"{kind}-*.bin")]
    path = folder / f"{kind}-{max(numbers, default=0) + 1}.bin"
    path.write_bytes(data)
    return path


def keep_seeds(decoders: Sequence[Decoder]) -> None:
    """Add the shortest seeds of decoders to the corpus, unless it has some."""
    for decoder in decoders:
        if not list((CORPUS / decoder.name).glob("seed-*.bin")):
            seeds = sorted({*decoder.seeds()}, key=lambda each: (len(each), each))
            step = 1 + len(seeds) // SEEDS_KEPT
            for data in seeds[::step]:
                if len(data) <= SEED_BYTES_MAX:
                    keep(decoder.name, data, "seed")


def fuzz(decoders: Sequence[Decoder], seconds: float, seed: int) -> int:
    """Run decoders one after the other; return the exit code."""
    print_line(f"seed {seed}, {len(decoders)} decoders, {seconds / len(decoders):.1f} s each")
    total = code = 0
    for decoder in decoders:
        count, defects = run(decoder, seconds / len(decoders), seed)
        total += count
        print_line(f"{decoder.name:22}{count:>12,} inputs, {len(defects)} defects")
        for defect in defects:
            code = 1
            print_line(f"    {defect.description} at {defect.location}")
            print_line(f"    kept as {keep(decoder.name, defect.data, 'found').relative_to(ROOT)}")
    print_line(f"{total:,} inputs in total")
    return code


def run_atheris(decoder: Decoder) -> None:
    """Fuzz a decoder with atheris, which writes into `build/fuzz`; does not return."""
    import atheris  # noqa: PLC0415 - not a dependency

    folder = ROOT / "build" / "fuzz" / decoder.name
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(decoder.all_seeds()):
        (folder / "inputs" / f"seed-{number}").write_bytes(data)
    for get_object in gc.get_objects():  # `instrument_all` takes minutes
        if isinstance(get_object, FunctionType) and (get_object.__module__ or "").startswith(
            "waltz_"
        ):
            atheris.instrument_func(get_object)
    atheris.Setup(
        [sys.argv[0], f"-artifact_prefix={folder}/", "-rss_limit_mb=2048", str(folder / "inputs")],
        decoder.check,
    )
    atheris.Fuzz()


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="duration of the whole run; default 60"
    )
    parser.add_argument("--decoder", action="append", choices=sorted(BY_NAME), metavar="NAME")
    parser.add_argument("--seed", type=int, help="default: random")
    parser.add_argument("--list", action="store_true", help="list the decoders")
    parser.add_argument("--input", type=Path, help="run only the input in this file")
    parser.add_argument("--atheris", action="store_true", help="needs the package atheris")
    parser.add_argument("--keep-seeds", action="store_true", help="add seeds to the corpus")
    for each in ("--worker", "--extremes"):  # only for child processes
        parser.add_argument(each, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--last", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return 0
    decoders = (
        [BY_NAME[decoder] for decoder in arguments.decoder] if arguments.decoder else DECODERS
    )
    if arguments.list:
        print_line("\n".join(decoder.name for decoder in decoders))
    elif arguments.input:
        for decoder in decoders:
            check_limited(decoder, arguments.input.read_bytes())
    elif arguments.keep_seeds:
        keep_seeds(decoders)
    elif arguments.atheris:
        run_atheris(decoders[0])
    else:
        seed = SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
        return fuzz(decoders, arguments.seconds, seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
