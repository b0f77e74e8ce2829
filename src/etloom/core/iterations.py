"""Finds the iterations of inference engines: events that span them, and the phase, batch and tokens in their names.

The patterns are the section ``iterations`` of `etloom.core.names`, which users extend.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core import categories
from etloom.core.arrays import is_in, is_present, make_frame, take_rows
from etloom.core.errors import InvalidValue
from etloom.core.names import Row, list_names, read_number
from etloom.core.steps import STEP_PATTERN, parse_step

PHASES = ("prefill", "decode", "mixed", "denoise")
_PHASE_WORDS = {
    "extend": "prefill",
    "prefill": "prefill",
    "context": "prefill",
    "decode": "decode",
    "generation": "decode",
    "target_verify": "decode",
    "mixed": "mixed",
    "denoise": "denoise",
}


@dataclass(frozen=True)
class Iteration:
    """The facts that the name of an engine iteration contains: phase, batch, tokens; None for a fact that is missing.

    Attributes:
        engine: Name of the engine, or `SERVING` if the name does not determine it (see `find_engine`).
        phase: One of `PHASES`.
        number: Number of the iteration.
        requests: Requests in the batch.
        tokens: Tokens that the batch computes.
        prefill_tokens: Of these, tokens of prompts.
        keys: Keys of all requests, sum.
        pairs: Pairs of query and key that causal attention computes, sum over the requests: of prompts the products of
            queries and keys less half of the squared queries, of decoding requests all products.
    """

    engine: str
    phase: str | None = None
    number: int | None = None
    requests: int | None = None
    tokens: int | None = None
    prefill_tokens: int | None = None
    keys: int | None = None
    pairs: int | None = None


_TRAINS = r"^Optimizer\.step|^autograd::engine"
"""Annotations and operators of a program that trains, whose modules do not denoise."""


def find_step_events(events: pl.DataFrame, step_name: str | None = None) -> pl.DataFrame:
    """Return the events that delimit the steps of a rank. All analyses use this definition of a step.

    These are the events that ``step_name`` matches, if it is given; else the annotations ProfilerStep#N; else the
    iterations of an inference engine (`find_iterations`).

    Args:
        events: The table ``events``.
        step_name: Regular expression over the names of host events. Its first group is the number, if it is one.

    Returns:
        row, step (number; null if it exceeds an integer), ts, end (ns) and pid, in order of time.
    """
    rows, numbers, has_numbers = _list_steps(events, step_name)
    return _span(events, rows, numbers if has_numbers else list(range(len(numbers))))


def has_step_numbers(events: pl.DataFrame, step_name: str | None = None) -> bool:
    """Return whether the names of a rank's steps contain distinct numbers; else `find_step_events` counts from 0."""
    return _list_steps(events, step_name)[2]


def _list_steps(
    events: pl.DataFrame, step_name: str | None
) -> tuple[NDArray[np.int64], list[int | None], bool]:
    """Return the rows of the events that delimit steps, the numbers in their names, and whether these are complete."""
    if step_name is not None:
        rows = _drop_nested(events, _match_rows(events, _compile(step_name)))
        numbers = [_first_number(re.search(step_name, name)) for name in events["name"][rows].cast(pl.String)]
        return rows, numbers, _are_distinct(numbers)
    annotations = categories.mask_events(events, categories.ANNOTATION_CATEGORIES) & _has_duration(events)
    rows = np.flatnonzero(categories.match_names(events, STEP_PATTERN, annotations))
    if rows.size:
        return rows, take_rows(events, rows).select(parse_step()).to_series().to_list(), True
    rows, iterations = find_iterations(events)
    numbers = [iteration.number for iteration in iterations]
    return rows, numbers, _are_distinct(numbers)


def find_iterations(events: pl.DataFrame) -> tuple[NDArray[np.int64], list[Iteration]]:
    """Return the row numbers of an engine's iteration events, and the phase, batch and tokens in their names.

    Of the rows of `etloom.core.names` the first one that matches an event is used. An iteration within another does not
    count.
    """
    none = np.zeros(0, np.int64)
    timed = _has_duration(events)
    distinct: dict[str, pl.Series] = {}
    masks = {
        "annotation": timed & categories.mask_events(events, categories.ANNOTATION_CATEGORIES),
        "python": timed & categories.mask_events(events, categories.PYTHON_CATEGORIES),
    }
    masks["module"] = masks["python"]
    for category, mask in masks.items():
        distinct[category] = events["name"].filter(pl.Series(mask)).unique().drop_nulls().cast(pl.String)
    trains = distinct["annotation"].str.contains(_TRAINS).any()
    for i, row in enumerate(list_names("iterations")):
        category = row.get("category", "annotation")
        if category not in masks or (category == "module" and trains):
            continue
        by_name = {
            name: parsed for name in distinct[category] if (parsed := parse_with_row(i, name)) is not None
        }
        if not by_name:
            continue
        rows = np.flatnonzero(masks[category] & is_in(events["name"], list(by_name)))
        rows = _drop_nested(events, rows)
        return rows, [by_name[name] for name in events["name"][rows].cast(pl.String)]
    return none, []


def find_engine(events: pl.DataFrame) -> str | None:
    """Return the inference engine that the operators, modules, frames and kernels of a trace show; None for none.

    Annotations do not identify an engine: forks and tools copy their form.
    """
    is_annotation = categories.mask_events(events, categories.ANNOTATION_CATEGORIES)
    names = events["name"].filter(pl.Series(~is_annotation)).unique().drop_nulls().cast(pl.String)
    rows = (row for row in list_names("engines") if names.str.contains(row["pattern"].pattern).any())
    return next((str(row["engine"]) for row in rows), None)


def _has_duration(events: pl.DataFrame) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = is_present(events["dur"])
    return mask


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidValue(
            f"invalid regular expression {pattern!r}: {error}",
            remedy=r"for example 'step_(\d+)'",
            option="step_name",
        ) from None


def _match_rows(events: pl.DataFrame, pattern: re.Pattern[str]) -> NDArray[np.int64]:
    """Return the row numbers of the host events with a duration whose name matches the pattern."""
    host = categories.mask_events(events, categories.HOST_CATEGORIES) & _has_duration(events)
    names = events["name"].filter(pl.Series(host)).unique().drop_nulls().cast(pl.String)
    return np.flatnonzero(host & is_in(events["name"], [name for name in names if pattern.search(name)]))


def _drop_nested(events: pl.DataFrame, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Remove rows of events that begin before an earlier remaining event of the same process ends."""
    outermost = []
    end_by_process: dict[int, int] = {}
    columns = events[rows].select("pid", "ts", end=pl.col("ts") + pl.col("dur"))
    for row, (pid, ts, end) in zip(rows.tolist(), columns.iter_rows(), strict=True):
        if ts >= end_by_process.get(pid, ts):
            outermost.append(row)
            end_by_process[pid] = end
    return np.array(outermost, np.int64)


def _are_distinct(numbers: list[int | None]) -> bool:
    """Return whether all step numbers are recorded, each once."""
    return None not in numbers and len(numbers) == len(set(numbers))


def _first_number(match: re.Match[str] | None) -> int | None:
    text = match[1] if match is not None and match.re.groups and match[1] else ""
    return int(text) if text.isdecimal() and len(text) < 16 else None


def _span(events: pl.DataFrame, rows: NDArray[np.int64], numbers: list[int | None]) -> pl.DataFrame:
    starts, durations, pids = (take_rows(events[name], rows) for name in ("ts", "dur", "pid"))
    step = pl.Series(numbers, dtype=pl.Int64)
    return make_frame({"row": rows, "step": step, "ts": starts, "end": starts + durations, "pid": pids})


def parse_iteration(name: str, category: str = "annotation") -> Iteration | None:
    """Parse phase, batch and tokens of an engine iteration from an event name; None for any other name.

    Args:
        name: The name.
        category: Of the event: annotation, python or module, as the rows of `etloom.core.names` distinguish.
    """
    for i, row in enumerate(list_names("iterations")):
        if row.get("category", "annotation") == category:
            iteration = parse_with_row(i, name)
            if iteration is not None:
                return iteration
    return None


def parse_with_row(i: int, name: str) -> Iteration | None:
    """Parse an event name with the iteration pattern number ``i``; None if the pattern does not match."""
    return _parse(list_names("iterations")[i], name)


def _parse(row: Row, name: str) -> Iteration | None:
    match = row["pattern"].search(name)
    if match is None:
        return None
    groups = match.groupdict()
    numbers = {key: number for key in groups if (number := read_number(match, key)) is not None}
    prefill, decode = (_count(numbers, kind) for kind in ("prefill", "decode"))
    phase = _PHASE_WORDS.get((groups.get("phase") or row.get("phase") or "").strip("_").lower())
    if phase is None and prefill is not None and decode is not None and prefill + decode:
        phase = "mixed" if prefill and decode else "prefill" if prefill else "decode"
    return Iteration(
        str(row.get("engine", "unknown")),
        phase,
        numbers.get("number"),
        numbers.get("requests", _add(numbers, "prefill_requests", "decode_requests")),
        numbers.get("tokens", _add_tokens(numbers)),
        numbers.get("prefill_tokens"),
        _add(numbers, "prefill_keys", "decode_keys"),
        _count_pairs(numbers),
    )


def _count_pairs(numbers: dict[str, int]) -> int | None:
    if not {"prefill_products", "prefill_squares", "decode_products"} <= set(numbers):
        return None
    return numbers["prefill_products"] - numbers["prefill_squares"] // 2 + numbers["decode_products"]


def _count(numbers: dict[str, int], kind: str) -> int | None:
    return numbers.get(f"{kind}_requests", numbers.get(f"{kind}_tokens"))


def _add(numbers: dict[str, int], first: str, second: str) -> int | None:
    return numbers[first] + numbers[second] if first in numbers and second in numbers else None


def _add_tokens(numbers: dict[str, int]) -> int | None:
    """Return the prefill plus decode tokens of an iteration; a decode request counts as one token by default."""
    if not numbers.get("prefill_requests", 1):
        numbers = {"prefill_tokens": 0, **numbers}
    if "decode_requests" in numbers:
        numbers = {"decode_tokens": numbers["decode_requests"], **numbers}
    return _add(numbers, "prefill_tokens", "decode_tokens")
