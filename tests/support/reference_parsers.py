"""The Kineto and execution-trace parsers once more: slow, obvious, in plain Python, to hold the native ones to.

`kineto` and `execution_trace` take the text of a whole, valid document and return its `Raw` tables, named as those of
the native parsers' ``take()``. Numbers are kept as the text the file has, so that nothing is rounded. JSON text
(arguments that no column holds, shapes, values) is given as the value it stands for, see `plain`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

I64 = range(-(2**63) + 1, 2**63)
NS_LIMIT = 4 * 10**18
LONGEST = 2**55
TEXT_NUMBER = -(2**40)


def has(members: Object, wanted: str) -> bool:
    return any(key == wanted for key, _ in members)


class Number(str):
    """A JSON number as the file writes it."""


class Object(list):
    """The members of a JSON object as pairs, in file order, repeated keys included."""

    def get(self, wanted: str, default: Any = None) -> Any:
        found = default
        for key, value in self:
            if key == wanted:
                found = value
        return found


ABSENT = object()


@dataclass
class Raw:
    tables: dict[str, dict[str, list[Any]]]
    header: list[tuple[str, Any]]
    rows: int
    troubles: Counter[str] = field(default_factory=Counter)


def load(text: str | bytes) -> Any:
    """A JSON document with `Number` and `Object` in it."""
    return json.loads(
        text, object_pairs_hook=Object, parse_int=Number, parse_float=Number, parse_constant=Number
    )


def plain(value: Any) -> Any:
    """A loaded value as something that can be compared; the order of an object's members says nothing."""
    if isinstance(value, Object):
        return ("object", sorted(((key, plain(member)) for key, member in value), key=repr))
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Number):
        return ("number", str(value))
    return without_halves(value)


def without_halves(value: Any) -> Any:
    """Half of a surrogate pair is no character: U+FFFD in its place."""
    return re.sub("[\ud800-\udfff]", "\ufffd", value) if isinstance(value, str) else value


def whole(value: Any) -> int | None:
    """An integer that fits 64 bits, also one written as a string, with a fraction of zeros or a power of ten."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"-?[0-9]+(\.0*|[eE]\+?[0-9]{1,2})?", value)
        and int(Decimal(value)) in I64
    ):
        return int(Decimal(value))
    return None


def unsigned(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value) and int(value) < 2**64:
        return int(value)
    return None


def real(value: Any) -> float | None:
    if isinstance(value, str) and re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", value):
        number = float(value)
        return number if abs(number) != float("inf") else None
    return None


def nanoseconds(value: Any) -> int | None:
    """Microseconds in decimal to whole nanoseconds, halves away from zero, within `NS_LIMIT`."""
    if not isinstance(value, Number) or not re.fullmatch(r"-?\d+\.?\d*([eE][+-]?\d+)?", value):
        return None
    if abs(Decimal(value)) > 10**17:
        return None
    ns = int((Decimal(value) * 1000).to_integral_value(ROUND_HALF_UP))
    return ns if abs(ns) <= NS_LIMIT else None


def text(value: Any) -> str | None:
    return without_halves(value) if isinstance(value, str) and not isinstance(value, Number) else None


class Rows:
    """A table that grows by rows; columns that a row does not name are null."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.rows: list[dict[str, Any]] = []

    def add(self, **values: Any) -> int:
        assert set(values) <= set(self.columns)
        self.rows.append(values)
        return len(self.rows) - 1

    def sort(self, key: Any) -> list[int]:
        """Sort stably by key(row); the new place of each row."""
        order = sorted(range(len(self.rows)), key=lambda row: key(self.rows[row]))
        place = [0] * len(order)
        for new, old in enumerate(order):
            place[old] = new
        self.rows = [self.rows[old] for old in order]
        return place

    def as_columns(self) -> dict[str, list[Any]]:
        return {name: [row.get(name) for row in self.rows] for name in self.columns}


# Kineto -----------------------------------------------------------------------------------------------------------

# Group of columns -> (key in args, column, what the value must be). "positive": 0 and -1 mean none; "natural": -1 and
# 2^32-1 mean none.
KINETO_FIELDS = {
    "events": [
        ("device", "device", "natural32"),
        ("stream", "stream", "natural"),
        ("correlation", "correlation", "positive"),
        ("External id", "external_id", "positive"),
        ("Record function id", "rf_id", "positive"),
        ("Sequence number", "seq_id", "natural"),
        ("Fwd thread id", "fwd_tid", "positive"),
    ],
    "arguments": [
        ("Input Dims", "dims", "json"),
        ("Input type", "types", "json"),
        ("Input Strides", "strides", "json"),
        ("Concrete Inputs", "concrete_inputs", "json"),
    ],
    "kernels": [
        ("grid", "grid", "triple"),
        ("block", "block", "triple"),
        ("registers per thread", "registers", "whole32"),
        ("shared memory", "shared_mem", "whole"),
        ("blocks per SM", "blocks_per_sm", "real"),
        ("warps per SM", "warps_per_sm", "real"),
        ("est. achieved occupancy %", "occupancy", "real"),
        ("bytes", "bytes", "whole"),
        ("memory bandwidth (GB/s)", "bandwidth", "real"),
        ("context", "context", "natural"),
        ("queued", "queued", "whole"),
        ("graph id", "graph_id", "positive"),
        ("graph node id", "graph_node_id", "positive"),
    ],
    "syncs": [
        ("cuda_sync_kind", "kind", "text"),
        ("wait_on_stream", "wait_stream", "natural"),
        ("wait_on_cuda_event_id", "wait_event", "natural"),
        ("wait_on_cuda_event_record_corr_id", "record_correlation", "positive"),
    ],
    "frames": [
        ("Python id", "python_id", "whole"),
        ("Python parent id", "python_parent_id", "whole"),
        ("Python module id", "module_id", "whole"),
    ],
    "comms": [
        ("Collective name", "collective", "text"),
        ("Process Group Name", "pg_name", "text"),
        ("Process Group Description", "pg_desc", "text"),
        ("Process Group Ranks", "ranks", "text"),
        ("Group size", "group_size", "whole"),
        ("Seq", "seq", "natural"),
        ("dtype", "dtype", "text"),
        ("In msg nelems", "in_nelems", "whole"),
        ("Out msg nelems", "out_nelems", "whole"),
        ("In split size", "in_split", "text"),
        ("Out split size", "out_split", "text"),
        ("Src Rank", "root", "natural"),
        ("Dst Rank", "peer", "natural"),
        ("Is asynchronized op", "is_async", "flag"),
        ("Comms Id", "comms_id", "unsigned"),
    ],
    "memory": [
        ("Addr", "addr", "unsigned"),
        ("Bytes", "bytes", "whole"),
        ("Total Allocated", "total_allocated", "whole"),
        ("Total Reserved", "total_reserved", "whole"),
        ("Device Type", "device_type", "whole32"),
        ("Device Id", "device", "natural32"),
    ],
}
FIELD_OF = {
    key: (group, column, kind) for group, fields in KINETO_FIELDS.items() for key, column, kind in fields
}
HOST_CATEGORIES = {
    "cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "overhead", "Trace",
}  # fmt: skip
JSON_COLUMNS = {
    "events": {"args"},
    "flows": {"args"},
    "arguments": {"dims", "types", "strides", "concrete_inputs"},
    "metadata": {"args"},
    "memory": {"args"},
    "nodes": {"inputs", "input_types", "outputs", "output_types", "attrs"},
    "tensors": {"shape", "stride"},
}


def _columns(group: str) -> list[str]:
    columns: list[str] = []
    for _, column, kind in KINETO_FIELDS[group]:
        columns += [f"{column}_{axis}" for axis in "xyz"] if kind == "triple" else [column]
    return columns


NOT_SO = object()


def _as(kind: str, value: Any) -> Any:
    """The value as its column holds it: None where it says "none", NOT_SO where it is of another kind."""
    if value is None:
        return None
    if kind == "json":
        return plain(value)
    if kind == "text":
        return NOT_SO if text(value) is None else text(value)
    if kind == "flag":
        if isinstance(value, bool):
            return int(value)
        return NOT_SO if whole(value) is None else int(whole(value) != 0)
    if kind == "real":
        return NOT_SO if real(value) is None else real(value)
    if kind == "unsigned":
        return NOT_SO if unsigned(value) is None else unsigned(value)
    if kind == "triple":
        parts = [whole(part) for part in value[:3]] if isinstance(value, list) else []
        good = len(parts) == 3 and all(part is not None and 0 <= part < 2**31 for part in parts)
        return parts if good else NOT_SO
    number = whole(value)
    if number is None:
        return NOT_SO
    sort, bits = kind.rstrip("0123456789"), kind.lstrip("abcdefghijklmnopqrstuvwxyz")
    if number in {"whole": (), "positive": (0, -1), "natural": (-1, 2**32 - 1)}[sort]:
        return None
    half = 2 ** (int(bits or 64) - 1)
    return number if -half <= number < half else NOT_SO


def text_number(known: list[str], value: Any) -> int:
    """The number of what is named by a text; a text is known by its characters, a number by how it is written."""
    if value not in known:
        known.append(str(value))
    return TEXT_NUMBER - known.index(value)


class Kineto:
    def __init__(self) -> None:
        side = {
            group: Rows("event", *_columns(group))
            for group in KINETO_FIELDS
            if group not in ("events", "memory")
        }
        basics = ("ph", "cat", "name", "ts", "dur", "pid", "tid", "args", "position")
        self.tables = {
            "events": Rows(*basics, *_columns("events")),
            **side,
            "memory": Rows("ts", "pid", "tid", "args", *_columns("memory")),
            "counters": Rows("ts", "pid", "name", "series", "value"),
            "flows": Rows("ph", "cat", "name", "ts", "pid", "tid", "flow", "args"),
            "metadata": Rows("kind", "pid", "tid", "args"),
        }
        self.troubles: Counter[str] = Counter()
        self.lanes: list[str] = []
        self.flow_ids: list[str] = []

    def lane(self, value: Any) -> int | None:
        if value is None:
            return None
        if whole(value) is not None:
            return whole(value)
        self.troubles["unexpected_type"] += text(value) is None
        return text_number(self.lanes, value)

    def flow(self, value: Any) -> int | None:
        if value is None:
            self.troubles["no_flow_id"] += 1
            return None
        if whole(value) is not None:
            return whole(value)
        self.troubles["text_flow_id"] += 1
        return text_number(self.flow_ids, value)

    def event(self, event: Any, position: int) -> None:
        if not isinstance(event, Object):
            self.troubles["invalid_event"] += 1
            return
        member = {"ph": "", "cat": "", "name": ""}
        left: list[tuple[str, Any]] = []
        all_args: list[Object] = []
        for key, value in event:
            if key in member and text(value) is not None:
                member[key] = value
            elif key in member or (key == "args" and not isinstance(value, Object)):
                self.troubles["unexpected_type"] += value is not None
                left += [(f".{key}", plain(value))] if value is not None else []
            elif key == "args":
                all_args.append(value)
            elif key not in ("ts", "dur", "pid", "tid", "id", "bp", "s"):
                left.append((f".{key}", plain(value)))
        member = {key: without_halves(value) for key, value in member.items()}
        ph = member["ph"]
        if ph in ("M", "C"):
            (self.metadata if ph == "M" else self.counter)(event, member["name"] or None, all_args)
            self.troubles["unstored_args"] += bool(left) or has(event, "id") or has(event, "dur")
            return
        fields: dict[str, Any] = {}
        for key, value in (pair for args in all_args for pair in args):
            if key == "Ev Idx":
                continue
            if key not in FIELD_OF:
                left.append((key, plain(value)))
                continue
            found = _as(FIELD_OF[key][2], value)
            fields.pop(key, None)
            if found is NOT_SO:
                left.append((key, plain(value)))
                self.troubles["unexpected_type"] += 1
            elif found is not None:
                fields[key] = (found, plain(value))
        ts = nanoseconds(event.get("ts"))
        if not ph or ts is None:
            self.troubles["no_time" if ph else "no_phase"] += 1
            return
        is_memory = ph == "i" and member["name"] == "[memory]"
        if is_memory or ph in ("s", "t", "f"):
            pid, tid = self.lane(event.get("pid")), self.lane(event.get("tid"))
            if is_memory:
                left += [(key, found[1]) for key, found in fields.items() if FIELD_OF[key][0] != "memory"]
                left += [(f".{key}", plain(event.get(key))) for key in ("id", "dur") if has(event, key)]
                args = ("object", sorted(left, key=repr)) if left else None
                values = self.values("memory", fields)
                self.tables["memory"].add(ts=ts, pid=pid, tid=tid, args=args, **values)
            else:
                names = {"cat": member["cat"] or None, "name": member["name"] or None}
                flow = self.flow(event.get("id"))
                left += [(key, value) for key, (_, value) in fields.items()]
                left += [(".dur", plain(event.get("dur")))] if has(event, "dur") else []
                args = ("object", sorted(left, key=repr)) if left else None
                self.tables["flows"].add(ph=ph, **names, ts=ts, pid=pid, tid=tid, flow=flow, args=args)
            return
        cat = member["cat"]
        on_host = cat in HOST_CATEGORIES or cat.endswith(("_runtime", "_driver"))
        wanted = {
            "arguments": True,
            "kernels": ph == "X" and not on_host and "cuda_sync_kind" not in fields,
            "syncs": "cuda_sync_kind" in fields,
            "frames": "Python id" in fields,
            "comms": "Collective name" in fields or "Process Group Ranks" in fields,
            "memory": False,
        }
        row = len(self.tables["events"].rows)
        for group, is_wanted in wanted.items():
            mine = [key for key in fields if FIELD_OF[key][0] == group]
            if mine and is_wanted:
                self.tables[group].add(event=row, **self.values(group, fields))
            elif mine:
                left += [(key, fields[key][1]) for key in mine]
        dur = self.duration(event, ph)
        pid, tid = self.lane(event.get("pid")), self.lane(event.get("tid"))
        if has(event, "id"):
            left.append((".id", plain(event.get("id"))))
        self.tables["events"].add(
            ph=ph,
            cat=cat or None,
            name=member["name"] or None,
            ts=ts,
            dur=dur,
            pid=pid,
            tid=tid,
            args=("object", sorted(left, key=repr)) if left else None,
            position=position,
            **self.values("events", fields),
        )

    def duration(self, event: Object, ph: str) -> int | None:
        dur = event.get("dur")
        if dur is None:
            self.troubles["no_duration"] += ph == "X"
            return None
        length = nanoseconds(dur)
        if length is None or length < 0 or length >= LONGEST:
            self.troubles["negative_duration" if (length or 0) < 0 else "invalid_duration"] += 1
            return None
        return length

    @staticmethod
    def values(group: str, fields: dict[str, Any]) -> dict[str, Any]:
        values = {}
        for key, column, kind in KINETO_FIELDS[group]:
            if key in fields and kind == "triple":
                values |= {f"{column}_{axis}": part for axis, part in zip("xyz", fields[key][0], strict=True)}
            elif key in fields:
                values[column] = fields[key][0]
        return values

    def metadata(self, event: Object, name: str | None, all_args: list[Object]) -> None:
        self.troubles["metadata_events" if all_args else "empty_metadata"] += 1
        for args in all_args[-1:]:
            pid, tid = self.lane(event.get("pid")), self.lane(event.get("tid"))
            self.tables["metadata"].add(kind=name, pid=pid, tid=tid, args=plain(args))

    def counter(self, event: Object, name: str | None, all_args: list[Object]) -> None:
        ts = nanoseconds(event.get("ts"))
        read = False
        for series, value in (pair for args in all_args for pair in args):
            if ts is None or real(value) is None:
                self.troubles["invalid_counter"] += 1
                continue
            read = True
            pid = self.lane(event.get("pid"))
            self.tables["counters"].add(
                ts=ts, pid=pid, name=name, series=without_halves(series), value=real(value)
            )
        self.troubles["counter_events" if read else "no_counter"] += 1

    def finish(self) -> dict[str, dict[str, list[Any]]]:
        place = self.tables["events"].sort(lambda row: (row["ts"], -(row["dur"] or 0)))
        for name in ("arguments", "kernels", "syncs", "frames", "comms"):
            for row in self.tables[name].rows:
                row["event"] = place[row["event"]]
            self.tables[name].sort(lambda row: row["event"])
        for name in ("memory", "counters", "flows"):
            self.tables[name].sort(lambda row: row["ts"])
        lanes = {"name": [without_halves(lane) for lane in self.lanes]}
        return {**{name: rows.as_columns() for name, rows in self.tables.items()}, "tracks": lanes}


def kineto(document: str | bytes) -> Raw:
    loaded = load(document)
    if isinstance(loaded, Object):
        header = [
            (key, value) for key, value in loaded if key != "traceEvents" or not isinstance(value, list)
        ]
        arrays = [value for key, value in loaded if key == "traceEvents" and isinstance(value, list)]
    else:
        header, arrays = [], [loaded]
    events = [event for array in arrays for event in array]
    reader = Kineto()
    for position, event in enumerate(events):
        reader.event(event, position)
    return Raw(reader.finish(), header, len(events), +reader.troubles)


# Execution trace --------------------------------------------------------------------------------------------------

NODE_FIELDS = [
    ("scope", "scope", "whole8"),
    ("tid", "tid", "whole"),
    ("fw_tid", "fw_tid", "positive"),
    ("fw_parent", "fw_parent", "positive"),
    ("seq_id", "seq_id", "natural"),
    ("rf_id", "rf_id", "positive"),
    ("op_schema", "op_schema", "text"),
    ("kernel_backend", "kernel_backend", "text"),
    ("kernel_file", "kernel_file", "text"),
]
COMM_FIELDS = [
    ("collective_name", "collective", "text"),
    ("dtype", "dtype", "text"),
    ("in_msg_nelems", "in_nelems", "whole"),
    ("out_msg_nelems", "out_nelems", "whole"),
    ("in_split_size", "in_split", "text"),
    ("out_split_size", "out_split", "text"),
    ("pg_name", "pg_name", "text"),
    ("pg_desc", "pg_desc", "text"),
    ("pg_size", "group_size", "whole"),
    ("global_rank_start", "rank_start", "whole"),
    ("global_rank_stride", "rank_stride", "whole"),
    ("is_asynchronized_op", "is_async", "flag"),
]


def parts_of_type(inside: str) -> list[str]:
    """A(b,c),D,E[f,g] -> A(b,c) | D | E[f,g]"""
    parts, depth = [""], 0
    for char in inside:
        depth += (char in "([<") - (char in ")]>")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part]


class Node:
    """Reads the inputs or outputs of one node."""

    def __init__(self, reader: ExecutionTrace, node: int, io: int) -> None:
        self.reader, self.node, self.io = reader, node, io
        self.index = 0
        self.item: int | None = None

    def argument(self, type_: str, value: Any, shape: Any, stride: Any, in_list: bool) -> Any:
        """What is left of the value: its tensors go to their table, and null takes their place."""
        if re.fullmatch(r"Tensor\((.*)\)", type_):
            if in_list:
                self.item = 0 if self.item is None else self.item + 1
            if self.tensor(type_[len("Tensor(") : -1], value, shape, stride):
                return None
            self.reader.troubles["invalid_tensor"] += 1
            return plain(value)
        listed = re.fullmatch(r"(?:GenericList|Tuple)\[(.*)\]", type_)
        if not listed or "Tensor(" not in type_ or not isinstance(value, list) or isinstance(value, Object):
            return plain(value)
        types = parts_of_type(listed[1])
        return [
            self.argument(_at(types, i, ""), part, _at(shape, i, ABSENT), _at(stride, i, ABSENT), True)
            for i, part in enumerate(value)
        ]

    def tensor(self, dtype: str, value: Any, shape: Any, stride: Any) -> bool:
        """[tensor_id, storage_id, offset, numel, itemsize, device]"""
        numbers = [whole(part) for part in value[:5]] if isinstance(value, list) else []
        if len(numbers) < 5 or None in numbers or not -(2**31) <= numbers[4] < 2**31:
            return False
        names = ("tensor_id", "storage_id", "offset", "numel", "itemsize")
        self.reader.tensors.add(
            node=self.node,
            io=self.io,
            index=min(self.index, 2**15 - 1),
            item=self.item,
            **dict(zip(names, numbers, strict=True)),
            device=(text(value[5]) or None) if len(value) > 5 else None,
            dtype=dtype,
            shape=None if shape is ABSENT else plain(shape),
            stride=None if stride is ABSENT else plain(stride),
        )
        return True


def _at(items: Any, index: int, default: Any) -> Any:
    return items[index] if isinstance(items, list) and index < len(items) else default


class ExecutionTrace:
    def __init__(self) -> None:
        sides = ("inputs", "input_types", "outputs", "output_types", "attrs")
        own = ("et_id", "name", "recorded_parent", "file_order")
        self.nodes = Rows(*own, *sides, *(column for _, column, _ in NODE_FIELDS))
        self.comms = Rows("node", *(column for _, column, _ in COMM_FIELDS))
        tensor = (
            "tensor_id",
            "storage_id",
            "offset",
            "numel",
            "itemsize",
            "device",
            "dtype",
            "shape",
            "stride",
        )
        self.tensors = Rows("node", "io", "index", "item", *tensor)
        self.troubles: Counter[str] = Counter()

    def odd(self, key: str, value: Any) -> None:
        """Of another type than expected: kept among the attributes."""
        self.troubles["unexpected_type"] += 1
        self.left.append((key, plain(value)))

    def number(self, key: str, value: Any, kind: str) -> int | None:
        found = _as("whole8" if kind == "whole8" else "whole", value)
        if (found == -1 and kind not in ("whole", "whole8")) or (found == 0 and kind == "positive"):
            return None
        if found is NOT_SO:
            # -1 written by an unsigned means none
            if value != "18446744073709551615" or not isinstance(value, Number) or kind == "whole8":
                self.odd(key, value)
            return None
        return found

    def node(self, node: Any, position: int) -> None:
        if not isinstance(node, Object):
            self.troubles["invalid_event"] += 1
            return
        self.left: list[tuple[str, Any]] = []
        given: dict[str, Any] = {}
        sides: dict[str, dict[str, Any]] = {"input": {}, "output": {}}
        parent = name = None
        for key, value in node:
            side, _, what = key.partition("_")
            if key in ("inputs", "outputs") and isinstance(value, Object):
                for part, content in value:
                    if part in ("values", "shapes", "types", "strides"):
                        self.part(sides[key[:-1]], part, part, content)
                    else:
                        self.left.append((part, plain(content)))
            elif key in ("inputs", "outputs"):
                self.part(sides[key[:-1]], "values", key, value)
            elif side in sides and what in ("shapes", "types"):
                self.part(sides[side], what, key, value)
            elif key == "attrs":
                self.attributes(value, given)
            elif key in ("ctrl_deps", "parent"):
                parent = value
            elif key == "name" and text(value) is None and value is not None:
                self.odd(key, value)
            elif key == "name":
                name = text(value) or name
            elif key != "id":
                self.attribute(key, value, given)
        et_id = whole(node.get("id"))
        if et_id is None:
            self.troubles["no_id"] += 1
            return
        row = len(self.nodes.rows)
        values: dict[str, Any] = {}
        for io, (side, parts) in enumerate(sides.items()):
            values |= self.side(row, io, side, parts)
        values |= {"recorded_parent": self.number("ctrl_deps", parent, "whole")}
        values |= self.fields(NODE_FIELDS, given)
        if any(key in given for key, _, _ in COMM_FIELDS):
            self.comms.add(node=row, **self.fields(COMM_FIELDS, given))
        attrs = ("object", sorted(self.left, key=repr)) if self.left else None
        self.nodes.add(et_id=et_id, name=name, file_order=position, attrs=attrs, **values)

    def part(self, parts: dict[str, Any], part: str, key: str, value: Any) -> None:
        if isinstance(value, list) and not isinstance(value, Object):
            parts[part] = value
        elif value is not None:
            self.odd(key, value)

    def attributes(self, value: Any, given: dict[str, Any]) -> None:
        if not isinstance(value, list) or isinstance(value, Object):
            if value is not None:
                self.odd("attrs", value)
            return
        for attr in value:
            name = text(attr.get("name")) if isinstance(attr, Object) else None
            if name and has(attr, "value"):
                self.attribute(name, attr.get("value"), given)
            else:
                self.odd("attrs", attr)

    def attribute(self, key: str, value: Any, given: dict[str, Any]) -> None:
        if key in {known for known, _, _ in (*NODE_FIELDS, *COMM_FIELDS)}:
            given[key] = value  # the last of a repeated key counts
        elif value != "":
            self.left.append((key, plain(value)))

    def fields(self, fields: list[tuple[str, str, str]], given: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, column, kind in fields:
            value = given.get(key)
            if kind == "text":
                values[column] = text(value) or None
                if value is not None and text(value) is None:
                    self.odd(key, value)
            elif kind == "flag":
                found = _as("flag", value)
                none = value == "18446744073709551615" and isinstance(value, Number)  # -1, as an unsigned
                if found is NOT_SO and not none:
                    self.odd(key, value)
                values[column] = None if found is NOT_SO else found
            else:
                values[column] = self.number(key, value, kind)
        return values

    def side(self, row: int, io: int, side: str, parts: dict[str, Any]) -> dict[str, Any]:
        if "values" not in parts:
            return {f"{side}s": None, f"{side}_types": None}
        types = parts.get("types", ABSENT)
        reader = Node(self, row, io)
        left = []
        for index, value in enumerate(parts["values"]):
            reader.index, reader.item = index, None
            type_ = text(_at(types, index, "")) or ""
            shape, stride = (_at(parts.get(name), index, ABSENT) for name in ("shapes", "strides"))
            left.append(reader.argument(type_, value, shape, stride, False))
        return {f"{side}s": left, f"{side}_types": None if types is ABSENT else plain(types)}

    def finish(self) -> dict[str, dict[str, list[Any]]]:
        place = self.nodes.sort(lambda row: row["et_id"])
        for table in (self.tensors, self.comms):
            for row in table.rows:
                row["node"] = place[row["node"]]
            table.sort(lambda row: row["node"])
        tables = {"nodes": self.nodes, "tensors": self.tensors, "comms": self.comms}
        return {name: rows.as_columns() for name, rows in tables.items()}


def execution_trace(document: str | bytes) -> Raw:
    loaded = load(document)
    assert isinstance(loaded, Object)
    nodes = [node for key, value in loaded if key == "nodes" and isinstance(value, list) for node in value]
    header = [(key, value) for key, value in loaded if key != "nodes" or not isinstance(value, list)]
    reader = ExecutionTrace()
    for position, node in enumerate(nodes):
        reader.node(node, position)
    return Raw(reader.finish(), header, len(nodes), +reader.troubles)
