"""Infer ranks from the paths of traces that do not state them: from the numbers and hosts in which the paths differ."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

# 20230628101435, 2024_01_05_10_22_33, Jul_15_10_52_41.1074, 1716200000000
_TIMES = re.compile(
    r"(?<!\d)(?:20\d\d([-_.]?)\d\d\1\d\d(?:[-_.T ]?\d\d[-_.:]?\d\d[-_.:]?\d\d(?:\.\d+)?)?|\d{10,})(?!\d)"
    r"|[A-Z][a-z]{2}_\d\d?_\d\d_\d\d_\d\d(?:\.\d+)?"
)
_ITERATIONS = re.compile(
    r"(?i)(?<![a-z])(?:iteration|iter|steps?|epoch|cycle|run|attempt|trial|exp|experiment|version|window|round)"
    r"[-_=]?\d+(?:[-_]\d+)*"
)
_TOKENS = re.compile(r"[A-Za-z]+|\d+|[^A-Za-z\d]+")
_HOSTS = ("node", "host", "pod", "machine", "server", "replica", "instance")
_PARALLEL = ("dp", "pp", "tp", "cp", "sp", "ep")
_LOCAL = ("local", "gpu", "device", "cuda", "xpu", "npu")
_INDICES = (*_HOSTS, *_PARALLEL, *_LOCAL, "rank", "worker", "proc", "process", "profile", "task", "actor")
_DERIVED = ("ep", "dp")
"""Ranks of groups that engines derive from the tensor-parallel rank, unless files differ in them only."""
_MIN_SPARSE = 8
"""A number that is not named as an index is one if it is below this, or below four times the number of its values."""


@dataclass(frozen=True)
class _Column:
    """A place in which paths differ: the value of each path there, and the word in front of a number."""

    values: tuple[int | str, ...]
    word: str
    is_folder: bool

    @property
    def is_index(self) -> bool:
        """Return whether the values are numbers that count processes or hosts, and not process ids."""
        numbers = [value for value in self.values if isinstance(value, int)]
        if len(numbers) < len(self.values) or self.word == "pid":
            return False
        distinct = set(numbers)
        if not self.word:
            return min(distinct) < 2 and max(distinct) - min(distinct) == len(distinct) - 1
        return self.word in _INDICES or max(distinct) < max(_MIN_SPARSE, 4 * len(distinct))


@dataclass(frozen=True)
class InferredRanks:
    """The rank of each path, in the order of the paths, and one line about their source."""

    ranks: tuple[int, ...]
    source: str


def mask_recording(path: str) -> str:
    """Return a path without the times and iterations in it: the same for two recordings of one process."""
    return _ITERATIONS.sub("", _TIMES.sub("", path))


def infer_ranks(paths: Sequence[str], find_device: Callable[[int], int | None]) -> InferredRanks | None:
    """Infer the rank of each path from the places in which the paths differ; None if they are ambiguous.

    One number is the rank. Several numbers (of host and device, or of parallel groups) are the digits of the rank.
    Processes whose numbers are ids are in the order of host and device.

    Args:
        paths: paths without times and iterations (`mask_recording`), all different.
        find_device: returns the device that a path's trace uses (number of the path -> device).
    """
    columns = _list_columns(paths)
    indices = [column for column in columns if column.is_index]
    names = [column for column in columns if not column.is_index and isinstance(column.values[0], str)]
    if _are_distinct(indices):
        indices = _drop_redundant(indices)
        if len(indices) == 1:
            (column,) = indices
            return InferredRanks(tuple(map(int, column.values)), f"the number after {_describe(column)}")
        if all(column.word in _INDICES for column in indices) and _has_outer_group(indices):
            return _combine(indices)
        return None
    if any(column.word in _LOCAL for column in indices) and _are_distinct([*names, *indices]):
        return _combine(_drop_redundant([*names, *indices]))
    if indices or all(isinstance(column.values[0], str) for column in columns):
        return None
    devices = [find_device(number) for number in range(len(paths))]
    identified = tuple(device for device in devices if device is not None)
    by_device = [*names, _Column(identified, "device", False)]
    return _combine(by_device) if len(identified) == len(paths) and _are_distinct(by_device) else None


def natural_key(path: str) -> list[tuple[int, str]]:
    """Return a key that sorts paths with the numbers in them by value."""
    return [(int(text), "") if text.isdecimal() else (-1, text) for text in _TOKENS.findall(path)]


def _list_columns(paths: Sequence[str]) -> list[_Column]:
    """Return the places in which paths differ: numbers and words, or whole parts of paths of unlike form."""
    split = [PurePosixPath(path).parts for path in paths]
    if len({len(parts) for parts in split}) > 1:
        return [_Column(tuple(paths), "", True)]
    columns = []
    for depth, parts in enumerate(zip(*split, strict=True)):
        is_folder = depth < len(split[0]) - 1
        tokens = [_TOKENS.findall(part) for part in parts]
        forms = {tuple(_form(token) for token in texts) for texts in tokens}
        if len(forms) > 1:
            columns.append(_Column(parts, "", is_folder))
            continue
        for place, texts in enumerate(zip(*tokens, strict=True)):
            if len(set(texts)) > 1:
                is_number = texts[0].isdecimal()
                values = tuple(map(int, texts)) if is_number else texts
                word = _find_word(tokens[0][:place]) if is_number else ""
                columns.append(_Column(values, word, is_folder))
    return columns


def _form(token: str) -> str:
    return "a" if token.isalpha() else "0" if token.isdecimal() else token


def _find_word(tokens: Sequence[str]) -> str:
    """Return the word in front of a number, in lower case; "local" in front of local_rank_3; "" if there is none."""
    words = [token.lower() for token in tokens[-4:] if token[-1:].isalnum()]
    if not words or not words[-1].isalpha():
        return ""
    return "local" if "local" in words[-2:] else words[-1]


def _are_distinct(columns: Sequence[_Column]) -> bool:
    rows: list[Hashable] = list(zip(*(column.values for column in columns), strict=True))
    return bool(rows) and len(set(rows)) == len(rows)


def _drop_redundant(columns: Sequence[_Column]) -> list[_Column]:
    """Drop the columns that are not needed to tell paths apart: derived groups first, then hosts, then the leftmost."""
    order = sorted(columns, key=lambda column: (_rank_word(column.word, _DERIVED), column.word not in _HOSTS))
    needed = list(columns)
    for column in order:
        rest = [other for other in needed if other is not column]
        if _are_distinct(rest):
            needed = rest
    return needed


def _rank_word(word: str, words: Sequence[str]) -> int:
    return words.index(word) if word in words else len(words)


def _has_outer_group(columns: Sequence[_Column]) -> bool:
    return any(column.word in (*_HOSTS, *_PARALLEL) for column in columns)


def _combine(columns: Sequence[_Column]) -> InferredRanks:
    """Return ranks whose digits are the columns: hosts first, then data- and pipeline-parallel ranks, then the rest."""

    def significance(column: _Column) -> int:
        is_host = column.word in _HOSTS or not column.is_index
        return 0 if is_host else 1 + _rank_word(column.word, ("dp", "pp"))

    ordered = sorted(columns, key=significance)
    digits = [_number_values(column) for column in ordered]
    sizes = [max(values) + 1 for values in digits]
    ranks = tuple(
        sum(digit * math.prod(sizes[place + 1 :]) for place, digit in enumerate(row))
        for row in zip(*digits, strict=True)
    )
    return InferredRanks(ranks, "the order of " + " and ".join(_describe(column) for column in ordered))


def _number_values(column: _Column) -> list[int]:
    """Return the values of a column from zero: a number that starts at zero as it is, others by their order."""
    numbers = [value for value in column.values if isinstance(value, int)]
    if len(numbers) == len(column.values) and min(numbers) == 0 and column.word not in _HOSTS:
        return numbers
    order = {text: place for place, text in enumerate(sorted(set(map(str, column.values)), key=natural_key))}
    return [order[str(value)] for value in column.values]


def _describe(column: _Column) -> str:
    word = column.word or ("folder" if column.is_folder else "file name")
    return f"'{column.word}'" if column.word else word
