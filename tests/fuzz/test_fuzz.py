"""Every decoder of bytes from outside returns a value, or raises an error that it declares.

These tests run the fuzzer for a short time, with the same inputs each time. `python -m tests.fuzz`
runs longer. tests/fuzz/corpus has an input for each defect that the fuzzer has found.
"""

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.__main__ import parsed
from tests.fuzz.decoder import CORPUS, ROOT, Decoder, Defect
from tests.fuzz.decoders import BY_NAME, DECODERS
from tests.fuzz.limits import check_limited
from tests.fuzz.mutations import INT32_MAX, inputs, with_extremes
from tests.time_limits import TEST_TIMEOUT_S
from waltz_core.errors import BadFormat

QUICK = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
each_decoder = pytest.mark.parametrize("decoder", DECODERS, ids=lambda each: each.name)


@each_decoder
def test_changed_and_random_bytes_give_a_value_or_a_declared_error(decoder):
    tried = set()

    @settings(QUICK, max_examples=decoder.examples)
    @given(inputs(decoder.all_seeds(), decoder.words))
    def run(data):
        tried.add(data)
        decoder.check(data)

    run()
    assert len(tried) >= decoder.examples // 3


@each_decoder
def test_each_decoder_decodes_its_first_seed(decoder):
    seed = decoder.all_seeds()[0]
    decoder.decode(seed)
    assert decoder.seal is None or decoder.seal(seed) == seed


@each_decoder
def test_inputs_of_the_corpus_give_a_value_or_a_declared_error(decoder):
    inputs = decoder.corpus()
    assert inputs, "no inputs: run python -m tests.fuzz --keep-seeds"
    for data in inputs.values():
        decoder.check(data)


def test_every_folder_of_the_corpus_belongs_to_a_decoder():
    assert {path.name for path in CORPUS.iterdir()} == set(BY_NAME)


def test_huge_numbers_need_no_more_memory_than_the_input_justifies():
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--worker", "--extremes"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT_S,
    )
    assert result.returncode == 0, result.stderr
    count, defects = parsed(result.stdout)
    assert not defects, "\n".join(map(str, defects))
    assert count > 30 * len(DECODERS)


# ---- the fuzzer itself


def decoder_of(decode, **options):
    return Decoder("broken", decode, (BadFormat,), lambda: [b"1234"], **options)


def fails(data):
    if data.startswith(b"\x7f\xff\xff\xff"):
        raise KeyError(data)
    raise BadFormat("not this")


def out_of_memory(data):
    raise BadFormat("too large") from MemoryError()


def test_an_undeclared_error_is_reported_with_its_location():
    with pytest.raises(
        Defect, match=r"broken: KeyError: .* at tests/fuzz/test_fuzz.py:\d+, for 7f"
    ):
        decoder_of(fails).check(INT32_MAX.to_bytes(4, "big"))
    decoder_of(fails).check(b"other")


def test_a_memory_error_reported_as_a_declared_error_is_a_defect():
    with pytest.raises(Defect, match="MemoryError"):
        decoder_of(out_of_memory).check(b"")


def test_inputs_with_corrected_checksums_are_decoded_too():
    with pytest.raises(Defect, match="KeyError"):
        decoder_of(fails, seal=lambda data: b"\x7f\xff\xff\xff" + data).check(b"other")


def test_a_decoder_that_does_not_end_is_a_defect():
    def spin(data):
        while True:
            pass

    with pytest.raises(Defect, match="CPU time"):
        check_limited(decoder_of(spin), b"", cpu_s=0.05)


def test_memory_out_of_proportion_to_the_input_is_a_defect():
    result = subprocess.run(
        [sys.executable, "-c", _TAKES_MEMORY],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT_S,
    )
    assert "bytes of memory" in result.stderr
    assert "MemoryError" in result.stdout


_TAKES_MEMORY = """
from tests.fuzz.decoder import Decoder, Defect
from tests.fuzz.limits import check_limited, limit_memory
limit_memory()
try:
    check_limited(Decoder("a", lambda data: bytearray(2 << 30), (), list), b"")
except Defect as defect:
    print(defect)
check_limited(Decoder("a", lambda data: bytearray(b"x") * (100 << 20), (), list), b"")
"""


def test_extreme_numbers_are_tried_at_every_offset():
    found = with_extremes(bytes(6), ())
    assert bytes(1) + INT32_MAX.to_bytes(4, "big") + bytes(1) in found
    assert len(found) == 6 * 8


@pytest.mark.parametrize("name", ["frames-storage", "permissions"])
def test_decoders_accept_some_of_the_mutated_inputs(name):
    """Changes must leave some inputs valid, and change the values of others."""
    decoder, outcomes = BY_NAME[name], set()

    @settings(QUICK, max_examples=100)
    @given(inputs(decoder.all_seeds(), decoder.words))
    def run(data):
        try:
            decoder.decode(data)
        except decoder.errors as error:
            outcomes.add(str(error)[:40])
        else:
            outcomes.add("a value")

    run()
    assert "a value" in outcomes
    assert len(outcomes) > 3
