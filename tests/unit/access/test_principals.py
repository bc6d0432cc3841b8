"""The principal of a certificate for a pattern (rules 1 and 2 of principals.py)."""

import pytest

from waltz_core.access.principals import compile_principal_pattern, is_principal_name, principal_of
from waltz_core.errors import BadConfig


def certificate(*subject, names=()):
    """A certificate as `ssl` returns it; each part of the subject has one attribute."""
    return {"subject": tuple((part,) for part in subject), "subjectAltName": tuple(names)}


SPARK_CERTIFICATE = certificate(
    ("countryName", "DE"),
    ("organizationName", "Data, Inc."),
    ("commonName", "spark-etl"),
    names=[
        ("DNS", "etl.example"),
        ("DNS", "www.example"),
        ("URI", "spiffe://example/etl"),
        ("IP Address", "10.0.0.1"),
    ],
)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("CN=(.+)", "spark-etl"),
        (r"URI=spiffe://example/(\w+)", "etl"),
        (r"DNS=(etl)\.example", "etl"),
        (r"SUBJECT=CN=([^,+]+),O=Data\\, Inc\.,C=DE", "spark-etl"),
        # Two names of the certificate give the same principal.
        (r"URI=spiffe://example/(etl)|DNS=(?:etl)\.example", "etl"),
        (r"(?:CN=spark-|DNS=)(etl)(?:\.example)?", "etl"),
        # Two principals, no match, a match of a part of a name, an empty principal.
        (r"DNS=(.+)", None),
        (r"CN=([a-z]+)", None),
        (r"N=(.+)", None),
        (r"CN=()spark-etl", None),
        (r"CN=spark-etl|(x)", None),
        # An IP address is not a name.
        (r"IP Address=(.+)", None),
    ],
)
def test_a_pattern_must_match_a_whole_name_and_give_one_principal(pattern, expected):
    assert principal_of(SPARK_CERTIFICATE, compile_principal_pattern(pattern)) == expected


@pytest.mark.parametrize(
    "name",
    ["anonymous", "other", "", "two words", "a" * 129, "ä", "a\nb", "a\n", "x\0y", "a,b", "a=b"],
)
def test_reserved_and_invalid_names_are_not_accepted_as_principals(name):
    principal = principal_of(
        certificate(("commonName", name)), compile_principal_pattern("(?s:CN=(.*))")
    )
    assert principal is None


def test_a_pattern_does_not_match_a_prefix_of_a_name():
    pattern = compile_principal_pattern("CN=(.+)")
    assert principal_of(certificate(("commonName", "spark-etl-2")), pattern) == "spark-etl-2"
    assert (
        principal_of(
            certificate(("commonName", "spark-etl")), compile_principal_pattern("CN=(spark)")
        )
        is None
    )


def test_two_different_common_names_give_no_principal():
    pattern = compile_principal_pattern("CN=(.+)")
    ann, bob = ("commonName", "ann"), ("commonName", "bob")
    assert principal_of(certificate(ann, bob), pattern) is None
    assert principal_of(certificate(bob, ann), pattern) is None
    assert principal_of(certificate(ann, ann), pattern) == "ann"


def test_a_separator_in_a_name_does_not_begin_another_part_of_the_subject():
    pattern = compile_principal_pattern(r"SUBJECT=CN=(\w+),O=trusted")
    forged = certificate(("commonName", "admin,O=trusted"))
    assert principal_of(forged, pattern) is None
    genuine = certificate(("organizationName", "trusted"), ("commonName", "admin"))
    assert principal_of(genuine, pattern) == "admin"


@pytest.mark.parametrize(
    ("value", "escaped"),
    [(" a ", r"\ a\ "), ("#1", r"\#1"), ('a"b<c>;d\\', r"a\"b\<c\>\;d\\"), ("a\0b", r"a\00b")],
)
def test_a_subject_is_written_as_rfc_4514_escapes_it(value, escaped):
    matched_names = []

    class Spy:
        def fullmatch(self, name):
            matched_names.append(name)

    principal_of(certificate(("organizationName", value), ("serialNumber", "7")), Spy())
    assert matched_names == [f"SUBJECT=serialNumber=7,O={escaped}"]


@pytest.mark.parametrize("nothing", [None, {}])
def test_without_a_certificate_there_is_no_principal(nothing):
    assert principal_of(nothing, compile_principal_pattern("(.*)")) is None


@pytest.mark.parametrize("pattern", ["CN=.+", "CN=(", "(?P<>x)"])
def test_a_pattern_that_is_invalid_or_has_no_group_is_an_error(pattern):
    with pytest.raises(
        BadConfig, match=r"principal_pattern: expected a regular expression .*, found '"
    ):
        compile_principal_pattern(pattern)


def test_a_principal_has_at_most_128_of_the_permitted_characters():
    assert is_principal_name("CN/a.b_c:d@e+f-9" + "x" * 112)
    assert not is_principal_name("CN/a.b_c:d@e+f-9" + "x" * 113)
