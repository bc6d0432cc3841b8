"""Changes of valid bytes, drawn by hypothesis in tests and by a `Random` in long runs.

A mutation is a tuple of numbers. So tests and long runs draw the same kinds of mutations, and
hypothesis can shrink them.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

INT32_MAX, INT64_MAX = (1 << 31) - 1, (1 << 63) - 1
MUTATIONS_MAX = 4
BYTES_MAX = 1 << 16
# Values that are most harmful as a count, a length or an offset.
EXTREMES = (
    *(0, 1, -1, 2, 7, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 1 << 20, 1 << 24, 1 << 28),
    *(INT32_MAX, INT32_MAX - 1, -INT32_MAX - 1, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62),
    *(INT64_MAX, INT64_MAX - 1, -INT64_MAX - 1),
)
WIDTHS = (1, 2, 4, 8)
BINARY_WORDS = (b"", b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", bytes(64))
_NUMBERS = (
    *(str(each).encode() for each in EXTREMES),
    *(b"9" * 5_000, b"-" + b"9" * 5_000, b"0x" + b"f" * 5_000, b"1e999", b"-1e999", b"1e400000"),
    *(b"0.5", b"-0", b"00", b"1_000", b"NaN", b"Infinity", b"-Infinity", b"inf", b"nan"),
)
TEXT_WORDS = (
    *_NUMBERS,
    *(b"null", b"true", b"false", b'""', b"[]", b"{}", b'"x"', b"[1]", b'{"a":1}', b'"-1"'),
    *(b"[" * 2_000, b'{"a":' * 2_000, b"[" * 400 + b"]" * 400, b"[" * 2_000 + b"]" * 2_000),
    *(b'"\\ud800"', b'"\\u0000"', b"\\u0660", "٣".encode(), "\u2028".encode(), b"\xed\xa0\x80"),
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\xfe\xff", b"\n", b"\r", b"\\", b'"', b"%", b"&", b"?"),
    *(b"xn--a", b"xn--" + b"a" * 70, b"a" * 300, b".." * 40, b"[::1]", b"1" * 20, b"+", b"-", b"="),
)
KINDS = (
    *("flip", "flip", "byte", "cut", "drop", "repeat", "splice"),
    *("insert", "overwrite", "number", "number", "digits"),
)


class Mutation(NamedTuple):
    """One change; `at` is an offset, modulo the size, and `value` chooses among values."""

    kind: str
    at: int
    size: int
    value: int


def mutate(
    data: bytes, other: bytes, mutations: Sequence[Mutation], words: tuple[bytes, ...]
) -> bytes:
    """Return changed bytes; `other` is a second input, to splice with."""
    for mutation in mutations:
        data = _apply_mutation(data, other, mutation, words)[:BYTES_MAX]
    return data


def _apply_mutation(data: bytes, other: bytes, change: Mutation, words: tuple[bytes, ...]) -> bytes:
    kind, position, size, value = change
    offset = position % (len(data) + 1)
    mutated = bytearray(data)
    if kind == "cut":
        del mutated[offset:]
    elif kind == "drop":
        del mutated[offset : offset + size]
    elif kind == "repeat":
        mutated[offset:offset] = mutated[offset : offset + size]
    elif kind == "splice":
        mutated[offset:] = other[value % (len(other) + 1) :]
    elif kind == "insert":
        mutated[offset:offset] = words[value % len(words)]
    elif kind == "overwrite":
        word = words[value % len(words)]
        mutated[offset : offset + len(word)] = word
    elif kind == "number":
        number = _number(value, len(data))
        mutated[offset : offset + len(number)] = number
    elif kind == "digits":
        _change_digits(mutated, offset, _NUMBERS[value % len(_NUMBERS)])
    elif offset < len(mutated):  # a byte
        mutated[offset] = value % 256 if kind == "byte" else mutated[offset] ^ (1 << value % 8)
    return bytes(mutated)


def _number(choice: int, size: int) -> bytes:
    """Return an extreme number, or one near the size of the input, in one of the layouts."""
    width = WIDTHS[choice % len(WIDTHS)]
    order = "big" if choice // len(WIDTHS) % 2 else "little"
    values = (*EXTREMES, size, size + 1, size - 1)
    value = values[choice // (2 * len(WIDTHS)) % len(values)]
    return (value % (1 << 8 * width)).to_bytes(width, order)


def _change_digits(data: bytearray, at: int, number: bytes) -> None:
    """Replace the run of digits at a place, or the next one."""
    start = at
    while start < len(data) and not 0x30 <= data[start] <= 0x39:
        start += 1
    while start > 0 and 0x30 <= data[start - 1] <= 0x39:
        start -= 1
    end = start
    while end < len(data) and 0x30 <= data[end] <= 0x39:
        end += 1
    data[start:end] = number


# ---------------------------------------------------------------------------------------------
# drawing


def _mutation(kind: str, number: int) -> Mutation:
    return Mutation(kind, number % BYTES_MAX, 1 + number % 61, number // BYTES_MAX)


# Only two draws for each mutation, because draws take most of the time of a quick test.
mutations = st.builds(_mutation, st.sampled_from(KINDS), st.integers(0, BYTES_MAX**2 - 1))


def inputs(seeds: Sequence[bytes], words: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Return the strategy of a decoder: changed valid bytes, and random ones."""
    seed = st.sampled_from(seeds)
    changes = st.lists(mutations, max_size=MUTATIONS_MAX)
    return st.builds(mutate, seed, seed, changes, st.just(words)) | st.binary(max_size=200)


def draw_input(rng: Random, seeds: Sequence[bytes], words: tuple[bytes, ...]) -> bytes:
    """Draw an input like `inputs`."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    data, other = rng.choice(seeds), rng.choice(seeds)
    changes = [
        _mutation(rng.choice(KINDS), rng.randrange(BYTES_MAX**2))
        for _ in range(rng.randint(1, MUTATIONS_MAX))
    ]
    return mutate(data, other, changes, words)


def with_extremes(seed: bytes, words: tuple[bytes, ...]) -> list[bytes]:
    """Return copies of a seed with huge numbers in each place of it."""
    made = []
    step = 1 + len(seed) // 300
    for offset in range(0, len(seed), step):
        for value, width in ((INT32_MAX, 4), (INT64_MAX, 8), ((1 << 32) - 1, 4), (1 << 26, 4)):
            for order in ("big", "little"):
                number = value.to_bytes(width, order)
                made.append(seed[:offset] + number + seed[offset + width :])
    if words is TEXT_WORDS:
        numbers = [str(value).encode() for value in (INT32_MAX, INT64_MAX, 1 << 70)]
        for offset in range(0, len(seed), step):
            if seed[offset : offset + 1].isdigit() and not seed[offset - 1 : offset].isdigit():
                for number in numbers:
                    changed = bytearray(seed)
                    _change_digits(changed, offset, number)
                    made.append(bytes(changed))
    return made
