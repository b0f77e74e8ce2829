"""The native parsers give what slow, obvious Python gives: column by column, whatever the chunks."""

from __future__ import annotations

import gzip
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom import _native
from support import native_parsers, reference_parsers
from support.examples import FULL_EXAMPLES, examples
from support.paths import DATA, ROOT, skip_without_data

CORPUS = ROOT / "tests" / "corpus"
_LARGE = 300 << 10  # bytes, compressed


def real_files() -> list[Path]:
    """The real files of this run of the tests; with the profile "quick" one rank of each run, and no large file."""
    paths = sorted(DATA.rglob("*.json.gz"))
    # Its files are pipelines of operations, not traces.
    paths = [path for path in paths if path.parent.name != "straggler_what_if"]
    if examples(FULL_EXAMPLES) == FULL_EXAMPLES:
        return paths
    by_kind = {(path.parent, re.sub(r"\d+", "", path.name)): path for path in reversed(paths)}
    return sorted(path for path in by_kind.values() if path.stat().st_size < _LARGE)


REAL = real_files()
VALID = {
    "kineto.json": "kineto",
    "kineto_printed.json": "kineto",
    "execution_trace.json": "execution_trace",
    "flat.json": "execution_trace",
}


def kind_of(document: bytes) -> str:
    return "kineto" if b'"traceEvents"' in document else "execution_trace"


@pytest.mark.slow
@pytest.mark.parametrize("path", skip_without_data(REAL), ids=lambda path: str(path.relative_to(DATA)))
def test_every_real_file(path: Path) -> None:
    document = gzip.decompress(path.read_bytes())
    kind = kind_of(document)
    native_parsers.assert_equal(kind, document)
    native_parsers.assert_accounted(kind, *native_parsers.parse(kind, document))


@pytest.mark.slow
@pytest.mark.parametrize("path", skip_without_data(REAL), ids=lambda path: str(path.relative_to(DATA)))
def test_every_event_of_every_real_file_is_accounted_for(path: Path) -> None:
    """What a Trace holds and what its stats count as skipped or joined is what json.load finds."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    trace = etloom.read(path)
    assert isinstance(trace, etloom.Trace)
    counts = dict(trace.stats.select("name", "count").iter_rows())
    is_kineto = isinstance(document, list) or "traceEvents" in document
    tables = ("events", "flows", "memory") if is_kineto else ("nodes",)
    ways = (
        "counter_events",
        "metadata_events",
        "closed_ranges",
        "end_without_begin",
        *native_parsers.SKIPPED,
    )
    found = sum(trace.table(name).height for name in tables)
    found += sum(counts.get(f"read.{way}", 0) for way in ways)
    rows = document if isinstance(document, list) else document["traceEvents" if is_kineto else "nodes"]
    assert found == len(rows)


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("size", [1, 2, 7, 100, 1 << 16])
def test_chunks_of_any_size(name: str, size: int) -> None:
    document = (CORPUS / name).read_bytes()
    native_parsers.assert_equal(VALID[name], document, native_parsers.in_chunks(document, size))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["critical_path/alexnet.json.gz", "linear/torch_et_0.json.gz"])
@pytest.mark.parametrize("size", [100, 4096, 1 << 20, 1 << 26])
def test_chunks_of_real_files(data: Path, name: str, size: int) -> None:
    document = gzip.decompress((data / name).read_bytes())
    native_parsers.assert_equal(kind_of(document), document, native_parsers.in_chunks(document, size))


NUMBERS = st.one_of(
    st.integers(-2, 10),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 0.5, 1.0005, 1e16, 1.5e-7, -1]),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ["12", "-3.0", "[1, ..., 3]", '"', "\\", "\n"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TIMES = (
    st.integers(0, 10**6) | st.floats(0, 1e15, allow_nan=False) | st.decimals(0, 10**15, places=3).map(float)
)
ARGS = st.dictionaries(
    st.sampled_from(sorted(reference_parsers.FIELD_OF)) | st.just("Ev Idx") | TEXTS,
    VALUES | st.lists(st.integers(0, 99), min_size=3, max_size=3),
    max_size=6,
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from("X" * 4 + "BEiIMstfCbneNOD")},
    optional={
        "cat": st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "hip_runtime", "python_function", ""])
        | TEXTS,
        "name": st.just("[memory]") | TEXTS | VALUES,
        "ts": TIMES,
        "dur": TIMES | st.integers(-5, 5),
        "pid": st.integers(-1, 9) | TEXTS | NUMBERS,
        "tid": st.integers(0, 2**40) | TEXTS | st.none(),
        "id": st.integers(0, 99) | TEXTS | NUMBERS | st.none(),
        "args": ARGS | ARGS | ARGS | VALUES,
        "s": st.just("t"),
        "other": VALUES,
    },
)
WRITERS: list[dict[str, Any]] = [
    {"separators": (",", ":")},
    {},
    {"indent": 2},
    {"ensure_ascii": False},
    {"indent": 1, "separators": (" ,\r\n", "\t: ")},
]


@settings(max_examples=examples(200))
@given(st.lists(EVENTS | VALUES, max_size=8), st.randoms(use_true_random=False), st.data())
@pytest.mark.slow
def test_generated_kineto(events: list[Any], shuffle: random.Random, draw: Any) -> None:
    for at, event in enumerate(events):
        if isinstance(event, dict):
            members = list(event.items())
            shuffle.shuffle(members)
            events[at] = dict(members)
    header = {"schemaVersion": 1, "distributedInfo": {"rank": 0}}
    document: Any = draw.draw(
        st.sampled_from([events, {"traceEvents": events, **header}, {**header, "traceEvents": events}])
    )
    text = json.dumps(document, **draw.draw(st.sampled_from(WRITERS))).encode()
    size = draw.draw(st.integers(1, len(text)))
    native_parsers.assert_equal("kineto", text, native_parsers.in_chunks(text, size))
    native_parsers.assert_accounted("kineto", *native_parsers.parse("kineto", text))


PLAIN_VALUES = (
    st.integers(0, 10**8) | st.integers(0, 2**40),
    st.integers(-1, 9),
    st.decimals(0, 10**9, places=3).map(float) | st.floats(0, 1e9),
    st.sampled_from(["a", "aten::mm", "[1, 2]", "x" * 40, "\\", '"', "é", "\x7f"]),
    st.lists(st.integers(0, 2000), min_size=3, max_size=3),
    st.lists(st.lists(st.integers(0, 9), max_size=3) | st.sampled_from(["]", "[", '"']), max_size=3),
)


@settings(max_examples=examples(100))
@given(
    st.lists(EVENTS.filter(lambda event: event["ph"] != "M"), min_size=1, max_size=4),
    st.integers(10, 60),
    st.randoms(use_true_random=False),
    st.data(),
)
@pytest.mark.slow
def test_generated_events_of_few_layouts(models: list[Any], count: int, choice: Any, draw: Any) -> None:
    """Most events have the members of a model in the same order; values have mostly one type; some have any."""

    def vary(value: Any, key: str, odd: list[Any]) -> Any:
        if key == "ph":
            return choice.choice("X" * 5 + "sfC")
        if choice.random() < 0.02:
            return choice.choice(odd)
        return value if key in ("cat", "other") else choice.choice(values[key])

    args = [model["args"] for model in models if isinstance(model.get("args"), dict)]
    values = {
        key: draw.draw(st.lists(choice.choice(PLAIN_VALUES), min_size=1, max_size=6))
        for key in sorted({key for members in args for key in members})
    }
    texts, numbers = PLAIN_VALUES[3], st.one_of(PLAIN_VALUES[:3])
    for key in ("name", "ts", "dur", "pid", "tid", "id", "s", "args"):
        values[key] = draw.draw(st.lists(texts if key in ("name", "s") else numbers, min_size=1, max_size=6))
    odd_values = [None, True, -1, 2**32 - 1, 1e30, "12", "", [], {}, {"a": [1]}]
    events = []
    for _ in range(count):
        model = choice.choice(models)
        event = {key: vary(value, key, [value]) for key, value in model.items() if choice.random() < 0.98}
        if isinstance(model.get("args"), dict):
            event["args"] = {key: vary(value, key, odd_values) for key, value in model["args"].items()}
        events.append(event)
    text = json.dumps({"traceEvents": events}, **draw.draw(st.sampled_from(WRITERS))).encode()
    size = draw.draw(st.integers(50, len(text)))
    native_parsers.assert_equal("kineto", text, native_parsers.in_chunks(text, size))
    native_parsers.assert_accounted("kineto", *native_parsers.parse("kineto", text))


ODD_VALUES = (
    b"null true false nan -inf 1e5 1.5e-3 -5 -0 0 01 1. .5 + - 1.25 1.2345 3000000000 4294967295 12345678.25 1-2 1e"
    b" 9223372036854775807 9223372036854775808 123456789012345678901234567890 1234567890123456.5 12x tru"
    b' "" "12" "a" "\\"" "\\\\" "\\u00e9" "\xc3\xa9" "\xff" "a\nb" "\\\n" "M" "C" "XX" "]" "},{" "x'
    b' [] [1,2,3] [1,2] [[1],[2]] ["]","[\\""] [1,[2} [nan] ["\xff"] {} {"a":{"b":1}} {"a":"}"} {"ph":"X"} [1 2] 1 2'
).split(b" ")
TOP_KEYS = ("ph", "cat", "name", "ts", "dur", "pid", "tid", "id", "bp", "other", "args")


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text, strict=True)
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("key", [*TOP_KEYS, *sorted(reference_parsers.FIELD_OF), "Ev Idx", "more"])
def test_an_odd_value_among_events_of_a_layout(key: str) -> None:
    """An event whose value differs in type from that of the events before is read as by its tokens."""
    plain_values = [b"7"] if key in reference_parsers.FIELD_OF else [b"7", b'"a\\"b"', b"1.250"]
    for plain in plain_values:
        valid = [value for odd in ODD_VALUES if _is_json(odd) for value in (odd, plain)]
        for values in (valid, *([odd, plain] for odd in ODD_VALUES if not _is_json(odd))):
            rows = [_event_with(key.encode(), value, at) for at, value in enumerate([plain, plain, *values])]
            tables, summary = native_parsers.parse("kineto", b'{"traceEvents": [' + b",\n".join(rows) + b"]}")
            native_parsers.assert_accounted("kineto", tables, summary)


@pytest.mark.parametrize(
    "rows",
    [
        [
            b'{"ph":"M","name":"x","ts":1.000,"args":{%s}}' % args,
            b'{"ph":"X","name":"x","ts":1.000,"args":{%s}}' % args,
        ]
        for args in (b'"a" 55', b'"a":5 "b":6', b'"a":5,', b',"a":5', b'"a"::5', b'"a":5,,"b":6')
    ]
    + [
        [
            b'{"ph":"X","ts":1,"Input Dims":%s,"args":{"Input Dims":%s}}' % (dims, dims)
            for dims in (b"[1]", b'[\\"]"]', b"[3]")
        ],
        [b'{"args":{},"ph":"X","ts":1.000,"args":{"zz":1},"other":2}'] * 3,
        [b'{"args":{},"ph":"C","ts":1.000,"args":{"zz":1},"ph":"X"}'] * 3,
        [b'{"ph":"X","ts":1,"args":{"a":1},"args":{}}', b'{"ph":"C","ts":1,"args":{},"args":{"a":1}}'] * 3,
        [
            b'{"ph":"X","name":"n","ts":1.000,"x":[1\\"],"y":"]","k":"}"}',
            b'{"ph":"X","name":"n","ts":1.000,"dur":1.000}',
        ],
    ],
)
def test_layouts_do_not_contain_damaged_text(rows: list[bytes]) -> None:
    """A layout contains only text that the tokens accept, although they do not check the args of metadata."""
    document = b'{"traceEvents": [' + b",\n".join(rows * 3) + b"]}"
    native_parsers.assert_accounted("kineto", *native_parsers.parse("kineto", document))


@pytest.mark.slow
def test_two_threads_add_no_tracks_of_damaged_rows() -> None:
    """The border between two threads may be inside a damaged row, one half of which parses and names a track."""
    memory = b'{"ph":"i","name":"[memory]","pid":%s,"tid":2,"ts":1.000,"s":"t","args":{"Addr":5}}'
    metadata = b'{"ph":"M","name":"x","pid":1,"args":{"name":"y"}}'
    sound, named = memory % b"1", memory % b'\\"1'
    damaged = [
        b'{"ph"b" 1":"M","name":"x","pid":1,"args"\xd4{"name":"y"}}',
        b'{"ph":"M","name":"x"grid":[1,2,3]id":1,"args":{"name":"y"}}',
        b'{"ph"dur":-1"b" 1":"M","name":"x","pid":1,"args"\xd4{"name":"y"}}',
    ]
    rows = [
        sound,
        damaged[1],
        sound,
        damaged[0],
        named,
        damaged[0],
        damaged[2],
        metadata,
        sound,
        metadata,
        metadata,
    ]
    document = b'{"traceEvents":[' + b",".join(rows) + b"]}"
    for size in range(20, 300, 3):
        tables, summary = native_parsers.parse("kineto", native_parsers.in_chunks(document, size))
        native_parsers.assert_accounted("kineto", tables, summary)


@pytest.mark.parametrize(
    "rows",
    [
        [b'{"ph":"X","ts":1.000,"dur":1.000,"args":{"Input Dims":[\\"]}}'],
        [b'{"ph":"X","a":[\\"]}', b'{"ph":"X","b":1}'],
        [b'{"ph":"M","name":"n","args":{"a" "["}}'],
    ],
)
def test_texts_without_an_end_do_not_take_quadratic_time(rows: list[bytes]) -> None:
    start = time.process_time()
    native_parsers.parse("kineto", b'{"traceEvents": [' + b",".join(rows * 8000) + b"]}")
    assert time.process_time() - start < 5


def _event_with(key: bytes, value: bytes, at: int) -> bytes:
    members = {
        b"ph": b'"X"',
        b"cat": b'"kernel"',
        b"name": b'"k"',
        b"pid": b"1",
        b"tid": b"2",
        b"ts": b"%d.500" % at,
    }
    args = {b"correlation": b"%d" % at}
    is_top = key.decode() in TOP_KEYS
    (members if is_top else args)[key] = value
    printed = b", ".join(b'"%s": %s' % member for member in args.items())
    return (
        b"{"
        + b", ".join(b'"%s": %s' % member for member in members.items())
        + (b"" if key == b"args" else b', "args": {%s}' % printed)
        + b"}"
    )


def test_most_events_are_read_without_tokens(data: Path) -> None:
    for name in ("critical_path/alexnet.json.gz", "critical_path/simple_add.json.gz"):
        document = gzip.decompress((data / name).read_bytes())
        parser = _native.kineto_parser()
        parser.feed(document)
        parser.finish()
        assert parser.known_rows > 0.9 * parser.rows, name


TENSOR = st.tuples(*[st.integers(0, 2**40)] * 5, st.sampled_from(["cpu", "cuda:0", ""])).map(list)
PAIR = st.lists(TENSOR, min_size=2, max_size=2)
ODD_TYPES = st.sampled_from(["Int", "None", "Tensor(x)", "Tuple[Int,Tensor(c)]"])
ARGUMENTS = st.one_of(
    st.tuples(TENSOR, st.just([2, 3]), st.just("Tensor(float)"), st.just([3, 1])),
    st.tuples(PAIR, st.just([[2], [3]]), st.just("GenericList[Tensor(a),Tensor(b)]"), st.just([[1], [1]])),
    st.tuples(VALUES, VALUES, ODD_TYPES, st.just([])),
)


@st.composite
def nodes(draw: Any) -> dict[str, Any]:
    def side() -> Any:
        if draw(st.integers(0, 9)) == 0:
            parts = st.sampled_from(["values", "shapes", "types", "strides", "more"])
            return draw(VALUES | st.dictionaries(parts, VALUES, max_size=3))
        columns = list(zip(*draw(st.lists(ARGUMENTS, max_size=3)), strict=True)) or [(), (), (), ()]
        return dict(zip(("values", "shapes", "types", "strides"), map(list, columns), strict=True))

    fields = [
        key for key, _, _ in reference_parsers.NODE_FIELDS + native_parsers.reference_parsers.COMM_FIELDS
    ] + ["more"]
    names = draw(st.lists(st.sampled_from(fields), unique=True, max_size=6))
    attrs = [{"name": name, "type": "x", "value": draw(VALUES)} for name in names]
    return {
        "id": draw(st.integers(-5, 50)),
        "name": draw(TEXTS | VALUES),
        "ctrl_deps": draw(st.integers(0, 50) | NUMBERS),
        "inputs": side(),
        "outputs": side(),
        "attrs": draw(st.just(attrs) | st.just(attrs) | st.lists(VALUES, max_size=2) | VALUES),
    }


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(st.lists(nodes(), max_size=5), st.data())
def test_generated_execution_traces(made: list[Any], draw: Any) -> None:
    document = {"schema": "1.1.1-chakra.0.0.4", "nodes": made, "finish_ts": 1}
    text = json.dumps(document, **draw.draw(st.sampled_from(WRITERS))).encode()
    size = draw.draw(st.integers(1, len(text)))
    native_parsers.assert_equal("execution_trace", text, native_parsers.in_chunks(text, size))
    native_parsers.assert_accounted("execution_trace", *native_parsers.parse("execution_trace", text))


def cuts(document: bytes, count: int) -> Iterator[int]:
    return iter(random.Random(1).sample(range(1, len(document)), count))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["hta_misc/compare_base.json.gz", "simple_add/benchmark_simple_add_et.json.gz"]
)
def test_truncated_anywhere(data: Path, name: str) -> None:
    """Every complete row before the cut is read, and the loss is told."""
    document = gzip.decompress((data / name).read_bytes())
    kind = kind_of(document)
    table, order = ("events", "position") if kind == "kineto" else ("nodes", "file_order")
    whole = native_parsers.parse(kind, document)[0][table].select(order, "name").sort(order)
    ends = row_ends(document, b'"traceEvents"' if kind == "kineto" else b'"nodes"')
    for cut in cuts(document, examples(2000)):
        tables, summary = native_parsers.parse(kind, document[:cut])
        complete = sum(end <= cut for end in ends)
        expected = whole.filter(pl.col(order) < complete)
        found = tables[table].select(order, "name").sort(order)
        assert found[order].to_list() == expected[order].to_list(), cut
        assert found["name"].to_list() == expected["name"].to_list(), cut
        assert summary["rows"] in (complete, complete + 1), cut
        assert summary["truncated"] or not document[cut:].strip(), cut
        native_parsers.assert_accounted(kind, tables, summary)


def row_ends(document: bytes, key: bytes) -> list[int]:
    """Where each row of the array behind that key ends, by counting brackets."""
    decoder = json.JSONDecoder()
    text = document.decode()
    at = text.index("[", text.index(key.decode())) + 1
    ends = []
    while True:
        while text[at] in ", \r\n\t":
            at += 1
        if text[at] == "]":
            return ends
        at = decoder.raw_decode(text, at)[1]
        ends.append(len(text[:at].encode()))


@pytest.mark.parametrize("size", [1 << 20, 100])
@pytest.mark.parametrize(
    "damaged",
    [
        b'{"ph": "X", "name": "d", "ts": 5, "dur": 1}]',
        b'{"ph": "X" "name": "d", "ts": 5, "args": {"l": [{"a": 1}, {"name": "x"}]}}',
        b'{"ph": "X", "name": "d"e", "ts": 5}',
        b'{"ph": "X", "name": "d", "ts": 5',
        b'{"ph": "X", "name": "\xff", "ts": 5}',
        b'{"ph": "X", "name": "d", "ts": NaN}',
    ],
)
def test_a_damaged_event_costs_no_other(damaged: bytes, size: int) -> None:
    def event(at: int) -> bytes:
        return b'{"ph": "X", "name": "n%d", "pid": 1, "tid": 2, "ts": %d, "dur": 1}' % (at, at)

    rows = [*map(event, range(50)), damaged, *map(event, range(50, 100))]
    document = b'{"traceEvents": [' + b",\n".join(rows) + b'], "after": 1}'
    tables, summary = native_parsers.parse("kineto", native_parsers.in_chunks(document, size))
    names = tables["events"]["name"].cast(pl.String).to_list()
    assert [name for name in names if name[0] == "n"] == [f"n{at}" for at in range(100)]
    assert summary["header"] == [(b"after", b"1")]
    native_parsers.assert_accounted("kineto", tables, summary)


@pytest.mark.slow
def test_a_row_without_an_end_fed_byte_by_byte_does_not_take_quadratic_time() -> None:
    start = time.process_time()
    rows = b'{"ph": "X", "name": "n", "ts": 1, "dur": 1},' + b'{"ph":"X","a":[{"ph":"X"},{"ph":"X"}},' * 3000
    tables, summary = native_parsers.parse("kineto", native_parsers.in_chunks(b'{"traceEvents": [' + rows, 1))
    assert tables["events"]["name"].drop_nulls().len() == 1
    native_parsers.assert_accounted("kineto", tables, summary)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("names", ["first", "second", "both"])
def test_texts_that_only_one_thread_meets_get_the_numbers_of_the_file_order(names: str) -> None:
    """Processes, threads and arrows that are named by texts, most of them at the end of a file, as Kineto writes it."""

    def event(i: int, half: str) -> dict[str, Any]:
        is_text = names in (half, "both")
        pid, tid = (f"process {i % 7} {half}", f"{i % 5}") if is_text else (1, 2)
        if i % 4 == 0:
            flow = f"arrow {i % 3}" if is_text else i
            return {"ph": "s", "name": "launch", "cat": "ac2g", "id": flow, "pid": pid, "tid": tid, "ts": i}
        return {"ph": "X", "name": f"op{i % 9}", "cat": "cpu_op", "pid": pid, "tid": tid, "ts": i, "dur": 1}

    rows = [event(i, "first" if i < 40 else "second") for i in range(100)]
    content = json.dumps({"traceEvents": rows}).encode()
    pieces = [content[at : at + 4000] for at in range(0, len(content), 4000)]
    for chunks in ([content], pieces):
        tables, _ = native_parsers.parse("kineto", chunks)
        assert sum(tables[name].height for name in ("events", "flows")) == 100


@pytest.mark.parametrize("fault", ["damaged row", "cut inside a row"])
def test_halves_that_do_not_parse_leave_the_texts_of_later_ones_as_they_are(fault: str) -> None:
    """Two threads parse some blocks; one block is parsed again as a whole; two threads parse the rest."""

    def event(i: int) -> dict[str, Any]:
        lane = f"thread {i % 6} of {i // 200}"
        return {
            "ph": "X",
            "name": f"op{i % 11} {i // 100}",
            "cat": "cpu_op",
            "pid": 1,
            "tid": lane,
            "ts": i,
            "dur": 1,
        }

    rows = [json.dumps(event(i)) for i in range(800)]
    if fault == "damaged row":
        rows[400] = rows[400].replace('"dur": 1', '"dur": 1 1')
    else:
        inner = [{"ph": "X", "name": f"no row {i}", "tid": f"no thread {i}"} for i in range(200)]
        rows[400] = json.dumps(event(400) | {"args": {"list": inner}})
    content = ('{"traceEvents": [' + ", ".join(rows) + "]}").encode()
    for size in (3000, 9000, 20_000):
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        tables, _ = native_parsers.parse("kineto", pieces)
        assert tables["events"].height == (799 if fault == "damaged row" else 800)


def test_halves_of_execution_traces_that_do_not_parse_leave_later_texts_as_they_are() -> None:
    source = json.loads((CORPUS / "execution_trace.json").read_bytes())
    nodes = []
    for i in range(900):
        node = dict(source["nodes"][i % len(source["nodes"])], id=i + 1, name=f"op{i % 13} {i // 30}")
        nodes.append(json.dumps(node))
    nodes[330] = nodes[330].replace('"id": 331', '"id": 331 1')
    header = json.dumps({key: value for key, value in source.items() if key != "nodes"})[:-1]
    content = (header + ', "nodes": [' + ", ".join(nodes) + "]}").encode()
    for size in (20_000, 60_000):
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        native_parsers.parse("execution_trace", pieces)


def test_a_number_in_the_range_of_texts_is_itself() -> None:
    rows = [
        {"ph": "X", "name": "op", "cat": "cpu_op", "pid": pid, "tid": 1, "ts": i, "dur": 1}
        for i, pid in enumerate([1, "a", "b", 1, "c", -(1 << 40), -(1 << 40) - 1, "d", "e", 7] * 10)
    ]
    native_parsers.parse("kineto", json.dumps({"traceEvents": rows}).encode())
