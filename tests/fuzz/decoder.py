"""The description of a decoder for the fuzzer, and the check of one input."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.fuzz.mutations import BINARY_WORDS

CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).resolve().parents[2]


class Defect(AssertionError):
    """A decoder has violated its declaration in the line `location`."""

    def __init__(self, decoder: str, data: bytes, description: str, location: str) -> None:
        super().__init__(
            f"{decoder}: {description} at {location}, for {data[:400].hex() or 'no bytes'}"
        )
        self.decoder = decoder
        self.data = data
        self.description = description
        self.location = location


@dataclass(frozen=True)
class Decoder:
    """A decoder of bytes from outside.

    `decode` returns, or raises one of `errors`: the errors that its docstring declares. `decode`
    may also check the decoded value with assertions. `seeds` returns valid bytes. `seal` corrects
    the checksums of changed bytes, so that decoding continues after the check of the checksums.
    `words` are inserted into inputs. `examples` is the number of inputs of a quick test.
    """

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], Sequence[bytes]]
    seal: Callable[[bytes], bytes] | None = None
    words: tuple[bytes, ...] = BINARY_WORDS
    examples: int = 20

    def check(self, data: bytes) -> None:
        """Decode bytes, as they are and sealed; raises Defect."""
        self._check(data)
        if self.seal is not None:
            sealed = self.seal(data)
            if sealed != data:
                self._check(sealed)

    def _check(self, data: bytes) -> None:
        try:
            self.decode(data)
        except self.errors as error:
            exhausted = memory_error_in(error)
            if exhausted is None:
                return
            raise self._defect(data, exhausted) from error
        except Exception as error:
            raise self._defect(data, error) from error

    def _defect(self, data: bytes, error: BaseException) -> Defect:
        return Defect(
            self.name, data, f"{type(error).__name__}: {error!s:.300}", location_of(error)
        )

    def all_seeds(self) -> list[bytes]:
        """Return the seeds, and the inputs of the corpus."""
        return [*_seeds_of(self.seeds), *self.corpus().values()]

    def corpus(self) -> dict[str, bytes]:
        """Return the inputs of the corpus by name."""
        files = sorted((CORPUS / self.name).glob("*.bin"))
        return {file.name: file.read_bytes() for file in files}


@cache
def _seeds_of(seeds: Callable[[], Sequence[bytes]]) -> tuple[bytes, ...]:
    return tuple(seeds())


def memory_error_in(error: BaseException) -> MemoryError | None:
    """Return the memory error that caused a declared error; pyarrow has its own class for it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def location_of(error: BaseException) -> str:
    """Return the innermost line of the project that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if frame.filename.startswith(str(ROOT))] or frames[:1]
    if not own_frames:
        return "an unknown location"
    return f"{own_frames[-1].filename.removeprefix(f'{ROOT}/')}:{own_frames[-1].lineno}"
