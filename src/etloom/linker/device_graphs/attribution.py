"""Attribute the kernels of each graph replay to captured calls, and so to operators, shapes and modules.

A replay belongs to the capture with the same sequence of kernels, else to the one that aligns best
(`sequence_alignment`). Captures of several batch sizes may have the same kernels: the batch of the iteration decides,
and otherwise the order, if all of them call the same operators with the same shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import iterations
from etloom.core.arrays import rows_of_ids, take_rows, to_array
from etloom.core.schema import Stat
from etloom.core.text import count_noun
from etloom.core.trace import Trace
from etloom.linker.device_graphs.replays import (
    MIN_AGREEMENT,
    UNKNOWN,
    Capture,
    Codes,
    Replays,
    align_sequences,
    count_cells,
    count_common,
    list_captures,
    list_replays,
)

Rows = NDArray[np.int64]

MIN_CONSISTENCY = 0.95
"""Least share of calls of unknown kernels that launch the kernel that calls of the same operator and shapes launch."""
MAX_ALIGNED_CELLS = 500_000_000
"""Cells of the alignments of all distinct kernel sequences of replays (`count_cells`), which take about half a minute;
replays of further sequences are not attributed. A replay of 400 kernels has 35,000 cells."""


@dataclass
class _Outcome:
    """Counts of the GPU activities that could not be attributed to an operator, and an example, by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, count: int, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + count
        self.examples.setdefault(reason, example)


def attribute_replays(trace: Trace) -> Trace:
    """Return the Trace with the captured call and its operator set in the `launches` rows of graph replays.

    Rows of stats count the activities that were attributed, and those that were not by reason: without a capture, of a
    refused capture, in a place where the alignment is uncertain.
    """
    replays = list_replays(trace)
    if replays is None:
        return trace
    captures = list_captures(trace)
    call, operator = (np.full(trace.launches.height, -1, np.int64) for _ in range(2))
    outcome = _Outcome()
    matcher = _Matcher(trace, captures)
    parts = [slice(*bounds) for bounds in itertools.pairwise(replays.bounds.tolist())]
    matcher.align([replays.codes[part] for part in parts])
    for i, launch in enumerate(replays.launch.tolist()):
        part = parts[i]
        match = matcher.match(replays.codes[part], launch, outcome)
        if match is None:
            continue
        capture, position = match
        pairs, known = replays.pairs[part], position >= 0
        call[pairs[known]] = capture.calls[position[known]]
        operator[pairs[known]] = capture.operators[position[known]]
        if not known.all():
            outcome.add(
                "graph_activity_ambiguous",
                int((~known).sum()),
                f"{capture.name}: kernels are missing, repeated or reordered",
            )
    return _store(trace, replays, call, operator).with_stats(_count(trace, replays, call, outcome))


def _store(trace: Trace, replays: Replays, call: Rows, operator: Rows) -> Trace:
    ids, launches = trace.events["id"], trace.launches
    columns = {}
    for name, rows in (("captured", call), ("operator", operator)):
        column = take_rows(ids, rows).alias(name)
        columns[name] = (
            column if name == "captured" else pl.select(pl.coalesce(column, launches["operator"])).to_series()
        )
    return trace.replace(launches=launches.with_columns(**columns))


def _count(trace: Trace, replays: Replays, call: Rows, outcome: _Outcome) -> list[Stat]:
    """Return the stats: attributed GPU activity of graph replays, and the remaining activity by reason."""
    durations = to_array(
        take_rows(trace.events["dur"], rows_of_ids(trace.events, trace.launches["device_event"])), 0
    )
    total = int(durations[replays.pairs].sum())
    attributed = replays.pairs[call[replays.pairs] >= 0]
    time = int(durations[attributed].sum())
    share = 100 * time / total if total else 100.0
    count = count_noun(replays.launch.size, "replay")
    example = f"{time / 1e6:,.3f} of {total / 1e6:,.3f} ms ({share:.1f} %) in {count}"
    return [
        Stat("link.graph_activity_attributed", "info", attributed.size, example),
        *(
            Stat(f"link.{reason}", "info", count, outcome.examples[reason])
            for reason, count in outcome.counts.items()
        ),
    ]


class _Matcher:
    """Finds the capture of each graph replay, and caches the result for each sequence of kernels."""

    def __init__(self, trace: Trace, captures: Sequence[Capture]) -> None:
        self.trace = trace
        self.captures = captures
        self.groups: dict[bytes, list[int]] = {}
        for i, capture in enumerate(captures):
            self.groups.setdefault(capture.codes.tobytes(), []).append(i)
        self.results: dict[bytes, tuple[list[int], Codes | None, str]] = {}
        self.previous = -1
        self.signatures: dict[int, bytes] = {}
        self.parent = rows_of_ids(trace.events, trace.events["parent"])
        self.names = trace.events["name"]
        self.tokens: dict[str, int | None] = {}

    def match(self, codes: Codes, launch: int, outcome: _Outcome) -> tuple[Capture, Codes] | None:
        """Return the captured graph that a replay executes and, for each kernel, its position among the captured calls.

        None if there is no capture; the reason is counted in ``outcome``.
        """
        candidates, position, problem = self.results[codes.tobytes()]
        if position is None:
            outcome.add(
                "graph_activity_without_capture" if not self.captures else "graph_activity_refused",
                codes.size,
                problem,
            )
            return None
        chosen = self._choose(candidates, launch)
        if chosen is None:
            example = f"{self.captures[candidates[0]].name}" + (
                f" and {len(candidates) - 1} more have the same kernels and other shapes"
                if len(candidates) > 1
                else " is smaller than the batch of the iteration"
            )
            outcome.add("graph_activity_undecided", codes.size, example)
            return None
        self.previous = chosen
        return self.captures[chosen], position

    def align(self, sequences: Sequence[Codes]) -> None:
        """Find the candidate captures of each distinct kernel sequence and the position of each kernel in them.

        If there are none, the reason. Stored in ``results``.
        """
        waiting: dict[tuple[int, int], list[Codes]] = {}
        cells = 0
        for codes in sequences:
            key = codes.tobytes()
            if key in self.results:
                continue
            self.results[key] = self._compare(codes)
            candidates, position, problem = self.results[key]
            if position is not None or problem:
                continue
            capture = self.captures[candidates[0]]
            cells += count_cells(codes.size, capture.codes.size)
            if cells > MAX_ALIGNED_CELLS:
                limit = "replays of too many different sequences of kernels; select fewer steps"
                self.results[key] = ([], None, limit)
                continue
            waiting.setdefault((candidates[0], codes.size), []).append(codes)
        for (i, _), group in waiting.items():
            positions = align_sequences(np.stack(group), self.captures[i].codes)
            for codes, position in zip(group, positions, strict=True):
                candidates, *_ = self.results[codes.tobytes()]
                name = self.captures[i].name
                refusal = f"{name}: kernels of other names in the same places; it is of another batch size"
                self.results[codes.tobytes()] = (
                    (candidates, position, "") if position is not None else ([], None, refusal)
                )

    def _compare(self, codes: Codes) -> tuple[list[int], Codes | None, str]:
        """Return the captures that fit a replay's kernels and each kernel's position in them, or why none fits.

        Neither position nor problem if that is known only after an alignment with the capture.
        """
        if not self.captures:
            return [], None, "no capture of the graph: record one, and put its trace next to this one"
        identity = np.arange(codes.size)
        if (group := self.groups.get(codes.tobytes())) is not None:
            return group, identity, ""
        unnamed = [i for i, capture in enumerate(self.captures) if self._fits_unnamed(capture, codes)]
        if unnamed:
            return unnamed, identity, ""
        shares = [
            (
                count_common(codes, self.captures[group[0]].codes)
                / max(codes.size, self.captures[group[0]].calls.size),
                group,
            )
            for group in self.groups.values()
        ]
        share, best = max(shares, key=lambda item: item[0])
        name = self.captures[best[0]].name
        if share < MIN_AGREEMENT:
            return (
                [],
                None,
                f"{name}: {100 * share:.0f} % of the kernels agree; it is of another model or batch size",
            )
        return best, None, ""

    def _fits_unnamed(self, capture: Capture, codes: Codes) -> bool:
        """Return whether a capture without all kernel names can be the source of a replay's kernel sequence.

        It fits if it has as many calls, of the same kinds, with the known kernel names, and if calls with equal
        operator and shapes launch the same kernel.
        """
        unknown = capture.codes == UNKNOWN
        if capture.calls.size != codes.size or not unknown.any():
            return False
        if (codes[unknown] < 0).any() or (capture.codes[~unknown] != codes[~unknown]).any():
            return False
        keys = self._describe_calls(capture)
        kernels: dict[object, dict[int, int]] = {}
        for call_key, code in zip(keys, codes.tolist(), strict=True):
            by_code = kernels.setdefault(call_key, {})
            by_code[code] = by_code.get(code, 0) + 1
        return sum(max(by_code.values()) for by_code in kernels.values()) >= MIN_CONSISTENCY * codes.size

    def _describe_calls(self, capture: Capture) -> list[tuple[object, ...]]:
        """Return, for each captured call, its operator, the operator's shapes, and its index within the operator."""
        events, arguments = self.trace.events, self.trace.arguments
        names = take_rows(events["name"], capture.operators).cast(pl.String).to_list()
        ids = take_rows(events["id"], capture.operators)
        rows = rows_of_ids(arguments.rename({"event": "id"}), ids)
        shapes = take_rows(arguments["dims"], rows).cast(pl.String).to_list()
        numbers, last, number = [], None, 0
        for operator in capture.operators.tolist():
            number = number + 1 if operator == last else 0
            last = operator
            numbers.append(number)
        return list(zip(names, shapes, numbers, strict=True))

    def _choose(self, candidates: Sequence[int], launch: int) -> int | None:
        """Return which of several captured graphs with equal kernels a launch replays; None if that is undecidable.

        A graph pads its batch, so its size is the smallest one that holds the tokens of the iteration.
        """
        sizes = [self.captures[i].tokens for i in candidates]
        tokens = self._batch_of(launch) if any(size is not None for size in sizes) else None
        if tokens is not None:
            candidates = [
                i for i, size in zip(candidates, sizes, strict=True) if size is None or size >= tokens
            ]
            if not candidates:
                return None
            smallest = min((size for size in sizes if size is not None and size >= tokens), default=None)
            candidates = [i for i in candidates if self.captures[i].tokens in (None, smallest)]
        if len(candidates) == 1:
            return candidates[0]
        if len({self._signature(i) for i in candidates}) > 1:
            return None
        # Pieces of one model replay in the order in which they were captured.
        return next((i for i in candidates if i > self.previous), candidates[0])

    def _signature(self, i: int) -> bytes:
        if i not in self.signatures:
            self.signatures[i] = repr(self._describe_calls(self.captures[i])).encode()
        return self.signatures[i]

    def _batch_of(self, launch: int) -> int | None:
        """Return the batch size (tokens) of the iteration around a launch, read from the enclosing annotations."""
        row = launch
        while row >= 0:
            if (tokens := self._tokens_in(self.names[row] or "")) is not None:
                return tokens
            row = int(self.parent[row])
        return None

    def _tokens_in(self, name: str) -> int | None:
        """Return the number of tokens that the name of an annotation states, or None; cached by name."""
        if name not in self.tokens:
            iteration = iterations.parse_iteration(name)
            self.tokens[name] = None if iteration is None else iteration.tokens
        return self.tokens[name]
