"""The native decoder of observer files gives what slow Python gives, also on damaged files."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etloom import _native
from etloom.core.errors import ReadError
from etloom.core.schema import TABLES
from etloom.formats import observer
from support import reference_observer
from support.examples import examples
from support.observer_files import CHUNK, DICTIONARY, FILE, begin, chunk, define, record, whole

FUNCTIONS = ("observer_records", "observer_arguments", "observer_incarnations")
DOUBLES = (
    0.0,
    -0.0,
    0.1,
    1.0,
    1e15,
    1e16,
    1e-4,
    1e-5,
    123456.75,
    5e-324,
    -1.5e300,
    float("nan"),
    float("-inf"),
)
TAGS = (
    *(b"T\1\0\0\0", b"O\1\0\0\0", b"O\2\0\0\0", b"U", b"i", b"d", b"c", b"t", b"f", b"N", b"s\1\0\0\0"),
    *(b"v\2\0\0\0", b"I\2\0\0\0", b"D\1\0\0\0", b"L\2\0\0\0", b"(\1\0\0\0", b"G\1\0\0\0", b"R\1\0\0\0"),
    b"o\1\0\0\0",
)
LAYOUTS = (
    b'{"dtype":null,"itemsize":null,"device":null,"shape":null,"stride":null}',
    b'{"dtype":"x","itemsize":4,"device":"cuda:0","shape":[],"stride":[]}',
    b"[1]",
    b"{",
)
TEXTS = (b'{"pg_name":"0","rank":3,"pg_desc":"x","group_size":2}', b'tex\xfft"', b"sum")
NOTES = (
    b'{"unfinished_step": 1}',
    b'{"collective":"allreduce","pg_name":"0","in_nelems":5,"in_split":[1]}',
    b'{"kernel_backend":"triton","kernel_file":"a"}',
)


def random_record(choose: random.Random) -> bytes:
    """A record of any type, mostly valid; few handles, so that ends, parents and repetitions meet."""
    handle = choose.choice((choose.randrange(12), choose.randrange(1 << 40), 5))
    doubles = [int.from_bytes(struct.pack("<d", number), "little") for number in DOUBLES]
    words = tuple(
        choose.choice((choose.randrange(8), choose.randrange(1 << 64), choose.choice(doubles)))
        for _ in range(choose.randrange(8))
    )
    kind, form, ns = choose.randrange(6), choose.randrange(10), choose.randrange(900)
    if kind < 3:
        made = begin(
            handle, ns, choose.choice((0, choose.randrange(12))), form, words, choose.choice((0, 7, 1))
        )
        return made[:40] + struct.pack("<I", choose.randrange(5)) + made[44:]
    if kind < 5:
        return record(2, choose.randrange(4), form, ns, handle, *words)
    others = (
        record(4, choose.randrange(2), 0, choose.randrange(1 << 62), 5),
        record(5, 0, 3, choose.choice((0, handle))),
        record(3, choose.randrange(5), form, choose.choice((1, 9, 1 << 32 | 8)), raw=b"aten::x\0"),
        record(7, 0, 0, 1),
    )
    return choose.choice(others)


def random_file(seed: int) -> bytes:
    """A file with random forms and records, open and closed chunks in any order, often damaged."""
    choose = random.Random(seed)
    forms = [b"".join(choose.choices(TAGS, k=choose.randrange(5))) for _ in range(6)]
    definitions = (
        DICTIONARY,
        define(2, 2, choose.choice(LAYOUTS)),
        *(define(3, 3 + i, form) for i, form in enumerate(forms)),
        *(define(4, 1, choose.choice(TEXTS)), define(4, 2, b"cpu"), define(4, 3, choose.choice(NOTES))),
        *(define(1, 2, b"record_param_comms\0\0x"), define(1, 3, b"ProfilerStep#1")),
    )
    chunks = [chunk(2, 0, b"".join(definitions), closed=choose.random() < 0.5)]
    for _ in range(choose.randrange(1, 4)):
        events = b"".join(random_record(choose) for _ in range(choose.randrange(25)))
        chunks.append(chunk(1, choose.randrange(4), events, closed=choose.random() < 0.7))
    if choose.random() < 0.5:
        choose.shuffle(chunks)
    data = bytearray(whole(*chunks))
    for _ in range(choose.choice((0, 0, 1, 4, 20))):
        begins = choose.choice((0, 4096, 4096 + 64, 4096 + CHUNK, 4096 + CHUNK + 64, 4096 + 2 * CHUNK))
        place = min(begins + choose.randrange(400), len(data) - 1)
        data[place] = choose.randrange(256)
    return bytes(data[: choose.randrange(len(data))] if choose.random() < 0.1 else data)


def outcome(path: Path) -> Any:
    """Tables and meta of a file, or the error."""
    try:
        trace = observer.read(path)
    except ReadError as error:
        return str(error)
    return {**{name: trace.table(name) for name in TABLES}, "meta": trace.meta}


def assert_equal(path: Path) -> None:
    native = outcome(path)
    with pytest.MonkeyPatch.context() as patch:
        for name in FUNCTIONS:
            patch.setattr(_native, name, getattr(reference_observer, name))
        expected = outcome(path)
    if isinstance(expected, str):
        assert native == expected
        return
    assert native["meta"] == expected["meta"]
    for name in TABLES:
        assert native[name].equals(expected[name]), name


@pytest.mark.slow
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_random_and_damaged_files(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "observer.etob"
    path.write_bytes(random_file(seed))
    assert_equal(path)


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=2), st.sampled_from("idc"))
def test_numbers_are_written_as_python_writes_them(words: list[int], tag: str) -> None:
    lists = [(np.array([1], "u8"), np.array([0], "u8"), np.array([2], "i8"))] * 2
    decoded = _native.observer_arguments(np.array(words, "u8"), lists, [(1, 2, [(tag, 0)], [])])
    assert decoded["texts"][1] == reference_observer.format_number(tag, words[: 2 if tag == "c" else 1])


def test_every_double_of_the_list_is_written_as_python_writes_it() -> None:
    words = np.array(DOUBLES).view("u8")
    count = len(words)
    lists = [(np.ones(count, "u8"), np.arange(count, dtype="u8"), np.ones(count, "i8"))] * 2
    decoded = _native.observer_arguments(words, lists, [(1, 1, [("d", 0)], [])])
    written = [decoded["texts"][text] for text in decoded["sides"][0][1]]
    assert written == [reference_observer.format_number("d", [int(word)]) for word in words]


@pytest.mark.parametrize(
    ("lists", "form", "message"),
    [
        ((1, 0, 3), (1, 3, [], []), "outside of the file"),
        ((1, 3, 0), (1, 0, [], []), "outside of the file"),
        ((1, 0, -1), (1, 0, [], []), "outside of the file"),
        ((1, 0, 2), (1, 2, [("i", 2)], []), "fewer words"),
        ((1, 0, 2), (1, 2, [("c", 1)], []), "fewer words"),
        ((1, 0, 2), (1, 2, [("x", 0)], []), "fewer words"),
        ((1, 0, 2), (1, 2, [], [(0, False)]), "fewer words"),
    ],
)
def test_places_outside_of_the_file_are_refused(lists: tuple[int, ...], form: Any, message: str) -> None:
    columns = tuple(np.array([value], dtype) for value, dtype in zip(lists, ("u8", "u8", "i8"), strict=True))
    with pytest.raises(ValueError, match=message):
        _native.observer_arguments(np.zeros(2, "u8"), [columns, columns], [form])


def test_a_plain_file(tmp_path: Path) -> None:
    path = tmp_path / "observer.etob"
    path.write_bytes(FILE)
    assert_equal(path)
