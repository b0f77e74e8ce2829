"""Checks the values that a reader took from a file against the schema, so that later code need not check them.

A value that its column cannot have (`etloom.core.schema.Column`: minimum, maximum, form) becomes null, and lone
surrogates, which are not characters, become U+FFFD. Everything changed is counted in stats. The entries of ``meta``
that etloom itself uses are checked alike.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import polars as pl

from etloom.core.arrays import list_distinct, rows_of_ids
from etloom.core.categories import HOST_CATEGORIES, NCCL_COLLECTIVE, mask_events
from etloom.core.schema import FLOAT_LIMIT, INTEGER_LIMIT, SIZE_LIMIT, TABLES, Column, Form, Stat
from etloom.core.trace import Trace
from etloom.formats.io.json_text import replace_surrogates
from etloom.formats.tables.meta_checks import check_meta

_MAX_RANK = 1 << 31
_MAX_EXAMPLE = 60  # characters
_MANY = 200
_MAX_CACHED = 1000
"""Characters of a text above which it is checked each time, so that long texts do not stay in memory."""


def check_values(trace: Trace) -> Trace:
    """Return the trace with values of its tables and meta that the schema does not allow replaced or removed.

    Tables that are not in memory are left as they are.
    """
    stats: list[Stat] = []
    changed = {}
    for name in trace.table_names:
        if name in trace.loaders or name == "stats":
            continue
        frame = trace.table(name)
        checked = check_table(name, _fill_process(name, frame, stats), stats)
        if checked is not frame:
            changed[name] = checked
    in_memory = {name: trace.table(name) for name in trace.table_names if name not in trace.loaders}
    changed |= _drop_missing_references(in_memory | changed, stats)
    meta = check_meta(trace.meta, stats)
    if not changed and not stats:
        return trace.replace(meta=meta)  # texts in it may have been repaired
    return Trace({**trace.tables, **changed}, meta, loaders=trace.loaders).with_stats(stats)


def check_table(name: str, frame: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Return a table with invalid values as null and without incomplete rows; the same object if all is valid.

    Adds rows to ``stats``.
    """
    if frame.is_empty():
        return frame
    changed: list[pl.Series] = []
    for column in TABLES[name].columns:
        series = frame[column.name]
        checked = _check_column(f"{name}.{column.name}", series, column, stats)
        if checked is not series:
            changed.append(checked)
    frame = frame.with_columns(changed) if changed else frame
    frame = _drop_incomplete_rows(name, frame, stats)
    if "id" in frame.columns:
        frame = _drop_repeated_ids(name, frame, stats)
    if name == "events":
        frame = _drop_untimed_events(frame, stats)
    if "parent" in frame.columns and (parents := _break_cycles(name, frame, stats)) is not None:
        frame = frame.with_columns(parents)
    return frame


def _drop_incomplete_rows(name: str, frame: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Remove rows in which a required column is null, and count them in ``stats``."""
    missing = [column for column in TABLES[name].required if frame[column].null_count()]
    if not missing:
        return frame
    complete = frame.drop_nulls(missing)
    count = frame.height - complete.height
    stats.append(
        Stat("read.incomplete_rows", "data_loss", count, f"rows of {name} without {', '.join(missing)}")
    )
    return complete


def _drop_repeated_ids(name: str, frame: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Remove rows with the id of an earlier row, because joins by id would repeat rows; count them in ``stats``."""
    ids = frame["id"].to_numpy()
    if (ids[1:] > ids[:-1]).all():  # as every reader numbers them
        return frame
    is_first = frame["id"].is_first_distinct()
    if is_first.all():
        return frame
    repeated = frame["id"].filter(~is_first)
    example = f"rows of {name} with the id of an earlier row, such as {repeated[0]}"
    stats.append(Stat("read.repeated_id", "data_loss", len(repeated), example))
    return frame.filter(is_first)


def _drop_missing_references(
    tables: Mapping[str, pl.DataFrame], stats: list[Stat]
) -> dict[str, pl.DataFrame]:
    """Return the tables in which an id of another table does not exist there: it becomes null, or if the column is
    required, the row is left out."""
    changed = {}
    for name, frame in tables.items():
        for column in TABLES[name].columns if name != "stats" else ():
            target = tables.get(column.refers or "")
            # Calls without times have no events, but keep the numbers of what would be their events.
            is_numbering = column.refers == "events" and target is not None and target.is_empty()
            if target is None or is_numbering or frame[column.name].null_count() == frame.height:
                continue
            references, ids = frame[column.name], target["id"]
            last = len(ids) - 1
            if last >= 0 and ids[last] == last == ids.max() and references.max() <= last:  # type: ignore[operator]
                continue  # ids are row numbers
            is_missing = references.is_not_null() & ~references.is_in(ids.implode())
            if not (count := int(is_missing.sum())):
                continue
            example = (
                f"{name}.{column.name} {references.filter(is_missing)[0]} is not an id of {column.refers}"
            )
            stats.append(Stat("read.missing_reference", "data_loss", count, example))
            nulled = frame.with_columns(references.set(is_missing, None))
            frame = changed[name] = nulled.drop_nulls(column.name) if column.required else nulled
    return changed


def _drop_untimed_events(events: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Remove events without a start, except NCCL collectives: NCCL's Inspector may record only the duration."""
    if not events["ts"].null_count():
        return events
    untimed = events["ts"].is_null() & ~pl.Series(mask_events(events, {NCCL_COLLECTIVE}))
    if not (count := int(untimed.sum())):
        return events
    stats.append(Stat("read.incomplete_rows", "data_loss", count, "rows of events without ts"))
    return events.filter(~untimed)


def _break_cycles(name: str, frame: pl.DataFrame, stats: list[Stat]) -> pl.Series | None:
    """Return the column ``parent`` with null in rows whose chain of parents never ends; None if all chains end.

    A saved trace states parents of its own; code that climbs to the root would not end.
    """
    parents = frame["parent"]
    if parents.null_count() == frame.height or (parents < frame["id"]).all():
        return None
    above = rows_of_ids(frame, parents)
    ancestor = above
    for _ in range(frame.height.bit_length()):  # then the ancestor is as many levels above as there are rows
        ancestor = np.where(ancestor >= 0, ancestor[ancestor], -1)
    endless = pl.Series(ancestor >= 0)
    if not endless.any():
        return None
    example = f"{name}.parent of row {endless.arg_true()[0]} leads back to it: now null"
    stats.append(Stat("read.parent_cycle", "data_loss", int(endless.sum()), example))
    return parents.set(endless, None)


def _fill_process(name: str, events: pl.DataFrame, stats: list[Stat]) -> pl.DataFrame:
    """Fill the missing process ids of host events if all other host events have the same process id.

    Events of a thread nest, and lie in steps, among the events of their process only.
    """
    if name != "events" or not 0 < events["pid"].null_count() < events.height:
        return events
    is_host = pl.Series(mask_events(events, HOST_CATEGORIES))
    processes = events["pid"].filter(is_host).drop_nulls().unique()
    absent = is_host & events["pid"].is_null()
    if len(processes) != 1 or not (count := int(absent.sum())):
        return events
    stats.append(
        Stat(
            "read.absent_value", "info", count, f"events.pid was absent: now {processes[0]}, the only process"
        )
    )
    return events.with_columns(events["pid"].set(absent, processes[0]))


def _check_column(label: str, series: pl.Series, column: Column, stats: list[Stat]) -> pl.Series:
    if column.form is not None:
        series = _check_form(label, series, column.form, stats)
    elif series.dtype.is_numeric() and column.name != "id" and column.refers is None:
        series = _check_range(label, series, column, stats)
    if column.default is not None and (absent := series.null_count()):
        if absent < len(series):  # else the format does not have it
            stats.append(
                Stat("read.absent_value", "info", absent, f"{label} was absent: now {column.default}")
            )
        series = series.fill_null(column.default)
    return series


def _check_range(label: str, series: pl.Series, column: Column, stats: list[Stat]) -> pl.Series:
    if series.dtype.is_unsigned_integer():
        return series  # addresses and hashes, with which nobody computes
    limit = FLOAT_LIMIT if series.dtype.is_float() else INTEGER_LIMIT
    low = -limit if column.minimum is None else column.minimum
    high = limit if column.maximum is None else column.maximum
    smallest: Any = series.min()
    largest: Any = series.max()
    if smallest is None or (low <= smallest and largest <= high and not _has_nan(series)):
        return series
    # The limits of 64 bits do not fit a narrower column; its own extremes do.
    valid = series.is_between(max(low, smallest), min(high, largest))
    if series.dtype.is_float():
        valid &= series.is_not_nan()
    invalid = series.filter(~valid)
    if not len(invalid):
        return series
    example = f"{label} {invalid[0]} is not in {low:,} to {high:,}: now null"
    stats.append(Stat("read.out_of_range", "data_loss", len(invalid), example))
    return series.set(~valid.fill_null(True), None)


def _has_nan(series: pl.Series) -> bool:
    # A sum is not a number if one of its parts is not; other parts may have that sum, too.
    return series.dtype.is_float() and math.isnan(series.sum()) and bool(series.is_nan().any())


def _check_form(label: str, series: pl.Series, form: Form, stats: list[Stat]) -> pl.Series:
    """Replace texts of a JSON column that do not have the declared form by null, and lone surrogates by U+FFFD."""
    if series.null_count() == len(series):
        return series
    unusual = _find_unusual_texts(list_distinct(series), form)
    repaired = {text: fixed for text in unusual if (fixed := _repair_text(text)) != text}
    invalid = [text for text in unusual if not _has_form(text, form)]
    if not invalid and not repaired:
        return series
    as_text = series.cast(pl.String)
    rows = int(as_text.is_in(invalid).sum())
    if rows:
        example = f"{label} {invalid[0][:_MAX_EXAMPLE]!r} is not of the form {form}: now null"
        stats.append(Stat("read.wrong_type", "data_loss", rows, example))
    rows = int(as_text.is_in(list(repaired)).sum())
    if rows:
        stats.append(Stat("read.invalid_characters", "info", rows, f"{label}: lone surrogates, now U+FFFD"))
    return as_text.replace({**repaired, **dict.fromkeys(invalid)}).cast(series.dtype)


def _find_unusual_texts(texts: pl.Series, form: Form) -> list[str]:
    """Return the texts that may not have the form, or may have a lone surrogate."""
    if len(texts) > _MANY:  # polars is faster for many texts, but compiling the patterns takes long
        usual = f"^(?:{_USUAL[form]})$"
        return texts.filter(~texts.str.contains(usual) | texts.str.contains(_SURROGATE_ESCAPE)).to_list()
    unusual = []
    for text in texts.to_list():
        check = _has_form_cached if len(text) <= _MAX_CACHED else _has_form
        if "\\u" in text or not check(text, form):
            unusual.append(text)
    return unusual


def _has_form(text: str, form: Form) -> bool:
    """Return whether a text has the declared form."""
    if (is_valid := _FORMS.get(form)) is not None:
        return is_valid(_parse(text))
    return re.fullmatch(_USUAL[form], text) is not None


_has_form_cached = lru_cache(maxsize=1 << 14)(_has_form)  # the ranks of a program have the same texts


def _repair_text(text: str) -> str:
    """Return JSON text with lone surrogates replaced by U+FFFD; unchanged if it has none or is not JSON."""
    if re.search(_SURROGATE_ESCAPE, text) is None:
        return text
    try:
        value = json.loads(text)
        clean = replace_surrogates(value)
        return text if clean == value else json.dumps(clean, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_integers(value: Any, low: int = -INTEGER_LIMIT, high: int = INTEGER_LIMIT) -> bool:
    return isinstance(value, list) and not [
        item for item in value if type(item) is not int or not low <= item <= high
    ]


def _is_shape(value: Any) -> bool:
    return _is_integers(value, 0, SIZE_LIMIT) and math.prod(value) <= SIZE_LIMIT


def _is_list_of(value: Any, is_item: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list whose elements pass ``is_item`` or are lists of values that pass it."""
    return isinstance(value, list) and all(
        is_item(item) or (isinstance(item, list) and all(map(is_item, item))) for item in value
    )


_FORMS: dict[Form, Callable[[Any], bool]] = {
    "shape": _is_shape,
    "shapes": partial(_is_list_of, is_item=_is_shape),
    "integers": _is_integers,
    "strides": partial(_is_list_of, is_item=_is_integers),
    "ranks": partial(_is_integers, low=0, high=_MAX_RANK),
    "values": lambda value: isinstance(value, list),
}


def _list_of(item: str) -> str:
    return rf"\[(?:{item}(?:, ?{item})*)?\]"


def _or_list_of(item: str) -> str:
    return f"(?:{item}|{_list_of(item)})"


_INTEGER = r"(?:0|[1-9][0-9]{0,%d})"  # [0-9]: \d also matches digits of other scripts
_INTEGERS = _list_of(f"-?{_INTEGER % 14}")
_DIGITS_OF_SHAPES = ((15,), (7, 7), (5, 5, 5), (4, 4, 3, 3), (3, 3, 3, 3, 3))
_SHAPES = ("(?:, ?)".join(_INTEGER % (digits - 1) for digits in sizes) for sizes in _DIGITS_OF_SHAPES)
_SMALL_SHAPE = rf"\[(?:{'|'.join(_SHAPES)})?\]"
"""At most 15 digits, so that the product of the sizes is below SIZE_LIMIT."""
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_SCALAR = rf'(?:{_NUMBER}|"[^"\\\x00-\x1f]*"|true|false|null)'
_VALUE = _or_list_of(_or_list_of(_SCALAR))
_TEXT = r'"(?:[^"\\]|\\[\s\S])*"'
_USUAL: dict[Form, str] = {
    "shape": _SMALL_SHAPE,
    "shapes": _list_of(_or_list_of(_SMALL_SHAPE)),
    "integers": _INTEGERS,
    "strides": _list_of(_or_list_of(_INTEGERS)),
    "ranks": _list_of(_INTEGER % 8),
    "values": _list_of(_VALUE),
    "texts": rf"\[\s*(?:{_TEXT}\s*(?:,\s*{_TEXT}\s*)*)?\]",
    "object": r"\{[\s\S]*\}",
}
"""Patterns of most valid texts, which need not be parsed; of forms that `_FORMS` lacks, of all."""
_SURROGATE_ESCAPE = r"\\u[dD][89a-fA-F]"
