"""Types of the native extension; native/ documents each function next to its implementation.

Arrays are one-dimensional. One of another type or layout is copied and converted, so an array that a function
changes in place must be contiguous and of the declared type. Lengths that do not fit raise ValueError.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

_Bool: TypeAlias = NDArray[np.bool_]
_U8: TypeAlias = NDArray[np.uint8]
_U32: TypeAlias = NDArray[np.uint32]
_U64: TypeAlias = NDArray[np.uint64]
_I16: TypeAlias = NDArray[np.int16]
_I32: TypeAlias = NDArray[np.int32]
_I64: TypeAlias = NDArray[np.int64]
_Index = TypeVar("_Index", np.int32, np.int64)
_Value = TypeVar("_Value", np.int64, np.int32, np.uint8)

NO_EDGE: int

class Column:
    """A column that an Arrow library can take, once."""

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]: ...

class ParserSummary(TypedDict):
    rows: int
    bytes: int
    found_rows: bool
    truncated: bool
    trailing: bool
    header: list[tuple[bytes, bytes]]
    troubles: dict[str, tuple[int, bytes]]

class Parser:
    """Takes the bytes of a trace (feed, finish) and gives its tables (take)."""

    @property
    def rows(self) -> int: ...
    @property
    def known_rows(self) -> int: ...
    def only_by_tokens(self) -> None: ...
    def feed(self, data: bytes | bytearray | memoryview) -> None: ...
    def room(self, size: int) -> memoryview: ...
    def extend(self, size: int) -> None: ...
    def finish(self) -> None: ...
    def cut(self) -> None: ...
    def summary(self) -> ParserSummary: ...
    def take(self) -> dict[str, dict[str, Column]]: ...

def kineto_parser() -> Parser: ...
def execution_trace_parser() -> Parser: ...

class PerfettoSummary(TypedDict):
    packets: int
    rows: int
    damaged: int
    trailing: int
    is_cut: bool
    epoch: int
    header: list[tuple[bytes, bytes]]
    troubles: dict[str, tuple[int, bytes]]
    unread_packets: dict[int, int]
    unread_fields: dict[int, int]

def find_compressed_packets(data: bytes | bytearray) -> list[tuple[int, int, int, int, bool]]: ...
def read_perfetto(
    data: bytes | bytearray, max_rows: int
) -> tuple[dict[str, dict[str, Column]], PerfettoSummary]: ...
def read_sqlite_table(
    path: bytes, file_bytes: int, root: int, columns: list[tuple[str, int, int, bool, bool]], max_rows: int
) -> tuple[dict[str, Column], int, list[int]] | None:
    """Return the columns of a table, its number of rows, and of values of another type; None: SQLite has to read it.

    Args:
        columns: Name, place in the table, type (0: whole, 1: real, 2: text, 3: not read), whether its
            value is the number of the row, and whether the column has a default value. In the order of their places.
    """

class PerfettoWriter:
    """Takes the events of a Chrome trace (add) and gives packets of a Perfetto trace."""

    @property
    def damaged(self) -> int: ...
    def start(self, epoch: int) -> bytes: ...
    def member(self, key: str, json: str) -> bytes: ...
    def add(self, events: bytes) -> bytes: ...

# Aligning two sequences of operators (align.cpp)

def edit_path(a: _I32, b: _I32, start: int, slack: int, most_edits: float) -> tuple[_I64, _I64]: ...

# Columns of polars as arrays (arrow_columns.cpp)

def filled(column: Any, null: int) -> _I64: ...
def filled_int32(column: Any, null: int) -> _I32: ...
def present(column: Any) -> _Bool: ...
def row_indexes(rows: _I64 | _I32) -> Any: ...
def column(values: NDArray[Any]) -> Any: ...
def text_column(offsets: _I64, bytes: _U8) -> Any: ...

# Sets of times (intervals.cpp)

def merge_intervals(starts: _I64, ends: _I64) -> tuple[_I64, _I64]: ...
def intersect_intervals(
    starts: _I64, ends: _I64, other_starts: _I64, other_ends: _I64
) -> tuple[_I64, _I64]: ...
def subtract_intervals(
    starts: _I64, ends: _I64, other_starts: _I64, other_ends: _I64
) -> tuple[_I64, _I64]: ...
def covered_before(starts: _I64, ends: _I64, times: _I64) -> _I64: ...
def covered(starts: _I64, ends: _I64, low: _I64, high: _I64) -> _I64: ...

# Arguments of operators as JSON (argument_texts.cpp)

class ArgumentTexts:
    def add_template(
        self,
        value: str,
        shape: str,
        places: list[tuple[int, int]],
        after_values: list[str],
        after_shapes: list[str],
    ) -> None: ...
    def set_places(self, node: _U32, io: _I32, index: _I32, item: _I32) -> None: ...
    def set_numbers(self, number: int, numbers: _I64, known: _Bool) -> None: ...
    def set_texts(self, number: int, codes: _I32, texts: list[str]) -> None: ...

class ArgumentSide:
    """The inputs (io 0) or outputs (io 1) of some nodes: a part of `row_texts`."""

    def __init__(self, arguments: ArgumentTexts, nodes: _U32, templates: _U32, io: int) -> None: ...

# Observer files (observer.cpp); formats/observer/records.py and arguments.py name what they take from the results

_ObserverList: TypeAlias = tuple[_U64, _U64, _I64]
"""Key of the form, first word and number of words of the argument list of each operator; key 0: none."""
_ObserverForm: TypeAlias = tuple[int, int, Sequence[str | tuple[str, int]], Sequence[tuple[int, bool]]]
"""Key; number of words; text, in which (tag, word) is a number; word (-1: undefined) and has_offset of each tensor."""

def observer_records(words: _U64, chunk_words: int, declared: int) -> dict[str, Any]:
    """Returns the operators sorted by handle, their lists, definitions, notes, windows and counts of damage."""

def observer_arguments(
    words: _U64, lists: Sequence[_ObserverList], forms: Sequence[_ObserverForm]
) -> dict[str, Any]:
    """Returns for inputs and outputs form (-1: none) and text of each operator; the texts; the tensors in order.

    ``tensor`` counts the tensors of all forms, those of outputs after those of inputs.
    """

def observer_incarnations(
    address: _U64, time: _I64, begin: _I64, is_created: _Bool, version: _I64 | None
) -> tuple[_U8, _I64]:
    """Returns whether each use of an address is that of a new object, and the number of the object from 1."""

# Rows of text from parts (row_texts.cpp)

_Part: TypeAlias = str | _I64 | tuple[_I32 | None, _I64, _U8] | tuple[ArgumentSide, int]

def row_texts(parts: Sequence[_Part], rows: int) -> tuple[_I64, _U8]:
    """Returns the offsets and bytes of rows that consist of constants, numbers, texts and arguments.

    Args:
        parts: For each part a constant, a number per row, or texts: the number of the text of each row (None: row i has
            text i), and the offsets and bytes of the texts; or arguments and what of them: values (0), shapes (1) or
            strides (2).
        rows: The number of rows.
    """

# Codes (codes.cpp)

def looked_up(table: _U8, codes: _U32, clip: bool = False) -> _U8:
    """Returns the entry of each code; with ``clip`` greater codes have the last one, else they raise ValueError."""

def codes_of(marked: _Bool, codes: _U32, size: int) -> _U8: ...
def distinct_codes(codes: _U32) -> tuple[_I64, _I32]:
    """Returns a row of each code, in the order of codes, and the number of each row's code; -1 for absent codes."""

def number_pairs(first: _I64, second: _I64) -> _I32: ...
def sums_of_pairs(
    chosen: _Bool, row: _I32, value: _I64, first: _U32, second: _U32, weight: _I64, wanted: _Bool
) -> tuple[_I32, _I64, _I64, _I64, _I64, _I64, _I64, _I64, _I64]:
    """Aggregates the chosen points by their pair of codes (first, second).

    Returns:
        An example row, the number of points, the number of points of value 0, the minimum, lower and upper median and
        maximum of the values, the sum of the weights, and the sum of the weights of points of value 0.
    """

# Sweeps over a graph (graph.cpp, quality.cpp): `first` holds the offsets of the edges into each point

def schedule(first: _I32, source: _I32, lag: _I64, time: _I64) -> None:
    """Sets each point with incoming edges to the maximum of source time + lag, in place."""

def schedule_scaled(
    first: _I32, source: _I32, lag: _I64, basis: _U8, scaled: int, factor: float, time: _I64
) -> None:
    """As `schedule`, with the positive lags of the edges of one basis times a factor, rounded."""

def latest(first: _I32, source: _I32, lag: _I64, recorded: _I64 | None, time: _I64) -> None:
    """Lowers each point to the minimum of target time - lag (- excess, with recorded times), in place."""

def residual(first: _I32, source: _I32, time: _I64, floor: _I64) -> _I64: ...
def excess(first: _I32, source: _I32, time: _I64, floor: _I64) -> _I64: ...
def walk_back(first: _I32, source: _I32, lag: _I64, near: _I64, time: _I64, kind: _U8, end: int) -> _I32: ...
def reach(first: _I32, source: _I32, reached: _U8, backward: bool) -> None:
    """Marks every point reachable from a marked one (or leading to one, if backward), in place."""

def explained_starts(
    first: _I32,
    source: _I32,
    time: _I64,
    floor: _I64,
    kind: _U8,
    own: _Bool,
    call: _I64,
    back: _I64,
    work: int,
    launch: int,
    overlap: int,
    soon: int,
    shifts: Sequence[int],
) -> tuple[int, int, int, list[int], int]:
    """Returns the starts, those that edges explain, those explained twice, those per shift, and the residual sum."""

def residual_sum(first: _I32, source: _I32, time: _I64, floor: _I64) -> int: ...

# Graphs without the points of chains (contraction.cpp)

def contract(first: _I32, source: _I32, anchors: _Bool) -> tuple[_I32, _I32, _I32, _I32, _I32]:
    """Returns the kept points; chain offsets per point; source and last edge of each chain; the chain of each edge."""

def change_chains(
    chain: _I32, last: _I32, edges: _I32 | None, difference: _I64, lag: _I64, sums: _I64, near: _I64 | None
) -> None:
    """Adds the differences of edges to the sums of chains, and sets the lags of last edges, in place."""

def scale_chains(
    chain: _I32,
    last: _I32,
    edges: _I32,
    floor: _I64,
    delay: _I64,
    kind: _U8,
    usual: _I64,
    times: float | None,
    to: int | None,
    more: int,
    upper: _I64,
    near: _I64,
    lower: _I64,
) -> tuple[int, float, float]:
    """Changes edges from their recorded lags; returns the delays that stay, and the sums of times before and after."""

def group_edges(
    chain: _I32, last: _I32, edges: _I32, floor: _I64, delay: _I64, rows: _I32
) -> tuple[_I32, _I32, _U8, _I32, _I32, _I32]:
    """Returns edges in the order of their chains: chain, end, and whether the chain ends, of each run; floor and row of
    each edge; and the edges with a delay or a long floor."""

def scale_groups(
    runs: _I32,
    bounds: _I32,
    ends: _U8,
    floors: _I32,
    rows: _I32,
    marked: _Bool | None,
    times: float,
    upper: _I64,
    near: _I64,
    lower: _I64,
) -> int:
    """Scales grouped edges with a marked row; returns how much longer they take."""

def select_edges(edges: _I32, rows: _I32, marked: _Bool) -> _I32: ...
def expand_chains(first: _I32, source: _I32, points: _I32, heads: _I32, last: _I32, path: _I32) -> _I32: ...
def mark_extremes(first: _I32, source: _I32, usable: _Bool, group: _I32) -> _U8: ...

# Nesting events on threads (nesting.cpp)

def nearest(parent: NDArray[_Index], wanted: _Bool) -> NDArray[_Index]: ...
def draw_lines(track: _I64, start: _I64, end: _I64, first: _I64, limit: int) -> tuple[_I64, int]: ...
def sum_calls(
    track: _I64, start: _I64, end: _I64, name: _I64, from_time: int, to_time: int
) -> tuple[_I64, _I64, _I64, _I64]:
    """Returns parent node, first event, number of events and time of each node."""

def nest(lane: _I64, start: _I64, end: _I64, tolerance: int = 0) -> tuple[_I64, _I16, _I64]: ...
def stack_tracks(
    track: _I64, start: _I64, end: _I64, kind: _U8, name: _I64, tolerance: int
) -> tuple[_I64, _I16, _I64, _I64, _I64, _I64]:
    """Returns parent, depth and exclusive time of each event, and the rows detached, crossed and clamped."""

# Ordering the points and edges of a graph (order.cpp); a column is a sequence of parts

def number_points(
    time: Sequence[_I64],
    source: Sequence[_I32],
    target: Sequence[_I32],
    kind: Sequence[_U8],
    chain: Sequence[bool],
) -> _I32: ...
def numbered(column: Sequence[NDArray[_Value]], number: _I32) -> NDArray[_Value]: ...
def order_edges(
    number: _I32,
    time: _I64,
    source: Sequence[_I32],
    target: Sequence[_I32],
    floor: Sequence[_I64],
    kind: Sequence[_U8],
    owner: Sequence[_I32],
    chain: Sequence[bool],
) -> tuple[_I32, _I32, _I64, _U8, _I32, _U8]:
    """Returns the edge offsets per point; source, floor, kind and owner of each edge; the kinds of dropped edges."""

# Points of host threads in order (tour.cpp)

def tour(
    marked: _Bool,
    lane: _I32,
    start: _I64,
    end: _I64,
    depth: _I16,
    parent: _I32,
    calls: _I32,
    submit: _I64,
) -> tuple[_I32, _U8, _I64, _I32, _I32, _I32, _I32]:
    """Returns event, role, time and enclosing event of each point; places of starts, ends and submissions."""

# PyTorch's caching allocator (allocator.cpp)

def run_allocator(
    action: NDArray[np.uint8],
    value: NDArray[np.int64],
    stream: NDArray[np.int64],
    pool: NDArray[np.int32],
    segments: tuple[NDArray[np.int64], ...],
    blocks: tuple[NDArray[np.int64], ...],
    driver: tuple[NDArray[np.int64], ...],
    limits: tuple[int, ...],
    garbage_threshold: float,
    divisions: tuple[int, ...],
    stop: int,
) -> tuple[tuple[NDArray[np.int64], ...], tuple[NDArray[np.int64], ...], tuple[NDArray[np.int64], ...]]: ...

# Memory snapshots (snapshot.cpp)

class SnapshotParser:
    """Reads a pickled memory snapshot in pieces."""

    def feed(self, piece: bytes) -> None:
        """Raises RuntimeError if the pickle is damaged or has more than plain values."""
    def finish(self) -> dict[str, Any]:
        """Returns the history as columns, and everything else as values; raises ValueError for repeated lists."""
