"""JSON as bytes: what is refused and where, what is written, and how deep a value is."""

import dataclasses
import enum
import json

import numpy
import pytest

from penstock import fast_json


@pytest.mark.parametrize(
    ("data", "words", "column"),
    [
        (b"", "unexpected end", 1),
        (b'{"a": [1, 2', "unexpected end", 12),
        (b'{"a": "\xc3\xa9", "b" 1}', "expected ':'", 16),
        (b'{"a": NaN}', "invalid character", 7),
        (b'{"a": "\\ud800"}', "surrogate", 8),
        (b'{"a": "\\\\\\udc00"}', "surrogate", 10),
        (b'{"a": "\\ud800\\u0041"}', "surrogate", 8),
        (b'{"a": "\\ud83d\\ude00", "b": 01}', "invalid number", 29),
        (b'"\xc3\xa9\xff"', "byte 0xff is not UTF-8", 3),
        ('"\ud800"', "surrogates not allowed", 1),
        (b"\xef\xbb\xbf1", "BOM", 1),
        (b"1e999", "out of range", 1),
    ],
)
def test_what_is_no_json_is_refused_and_located(data, words, column):
    with pytest.raises(fast_json.DecodeError) as caught:
        fast_json.loads(data)
    assert words in caught.value.msg
    assert caught.value.colno == column


def test_a_value_too_deep_for_the_stack_is_refused():
    with pytest.raises(fast_json.DecodeError, match="nested too deeply"):
        fast_json.loads(b"[" * 1_000_000)


def test_what_it_writes_the_standard_library_reads_back():
    class Colour(enum.StrEnum):
        RED = "red"

    class Name(str):
        __slots__ = ()

    @dataclasses.dataclass
    class Point:
        x: int
        y: float

    value = {"é": [Colour.RED, Name("n"), Point(1, 0.5)], "array": numpy.arange(3, dtype=numpy.float32), "nan": float("nan")}
    written = fast_json.dumps(value | {"raw": fast_json.Raw(b'{"as": "is"}')})
    expected = {"é": ["red", "n", {"x": 1, "y": 0.5}], "array": [0, 1, 2], "nan": None, "raw": {"as": "is"}}
    assert json.loads(written) == expected
    assert b'{"as": "is"}' in written
    with pytest.raises(TypeError, match="object"):
        fast_json.dumps(object())


def test_a_float32_has_as_few_digits_as_bring_it_back():
    values = numpy.float32([0.1, 1 / 3, 1e-30, -3.4e38, 0.0, 1.0, float("nan")])
    written = b"[0.1,0.33333334,1e-30,-3.4e+38,0.0,1.0,null]"
    assert fast_json.dumps(values) == written
    assert fast_json.dumps(numpy.stack([values, values])) == b"[%s,%s]" % (written, written)
    assert fast_json.dumps({"a": values[:0], "b": numpy.zeros((0, 3), numpy.float32)}) == b'{"a":[],"b":[]}'
    random = numpy.random.default_rng(0).integers(0, 2**32, 20_000, dtype=numpy.uint32).view(numpy.float32)
    random = random[numpy.isfinite(random)]
    assert numpy.array_equal(numpy.float32(json.loads(fast_json.dumps(random))), random)


def test_arrays_of_other_kinds_and_orders_are_written_too():
    whole = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    for array in (whole.T, whole[:, ::2], whole.astype(numpy.float64), whole.astype(numpy.int8), whole[None], whole[0, 1]):
        assert json.loads(fast_json.dumps([array])) == [array.tolist()]


@pytest.mark.parametrize("levels", [1, 5])
def test_levels_are_counted(levels):
    value = 1
    for nth in range(levels):
        value = [value, 2] if nth % 2 else {"a": value}
    assert fast_json.is_deeper(value, levels - 1)
    assert not fast_json.is_deeper(value, levels)
    assert not fast_json.is_deeper("[[", 0)
