"""Describes a recorded operator: from the node of the execution trace, else from Kineto's record of its arguments."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import polars as pl
import torch

from etloom.core import categories
from etloom.core.arrays import rows_of_ids
from etloom.core.intervals import Intervals
from etloom.core.trace import Trace
from etloom.replayer.compute.operators import resolve_operator
from etloom.replayer.compute.program import Program, StorageVersions, make_step
from etloom.replayer.compute.program_steps import DTYPES, ProgramStep, TensorView, convert_value
from etloom.replayer.compute.size_checks import SIZE_CHECKS
from etloom.replayer.compute.tensor_initialization import choose_contents, infer_bounds

_OPERATOR = re.compile(r"aten::[A-Za-z_]\w{0,199}", re.ASCII)
_OTHER_LIBRARY = re.compile(r"([A-Za-z_]\w{0,99})::[\w.]{1,200}", re.ASCII)
_PACKAGES = {
    "_C": "vllm", "_moe_C": "vllm", "_vllm_fa3_C": "vllm", "_rocm_C": "vllm", "aiter": "amd-aiter",
    "fbgemm": "fbgemm-gpu",
    "flash_attn": "flash-attn", "flash_attn_3": "flash-attn", "sgl_kernel": "sgl-kernel", "tex": "transformer-engine",
    "transformer_engine": "transformer-engine", "torch_sparse": "torch-sparse",
}  # fmt: skip
"""Namespace of operators -> the package that registers them, if it has another name."""
_NUMBER_LIKE = {"double": 0.5, "long int": 1, "long": 1}
"""Numbers that Python passed to an operator are recorded as tensors of these types without dimensions."""
_SPELLINGS = {re.sub(r"c10::|\W", "", name).lower(): name for name in reversed(DTYPES)}
"""Type as any tool spells it (BFloat16), without case and punctuation -> C++ name of the type."""
_MAX_TEXT = 100_000


@dataclass
class _Arguments:
    """The arguments of a call as an execution trace records them: the schema, values, and rows of tensors."""

    schema: str
    inputs: str
    tensors: list[dict[str, Any]]
    has_devices: bool
    attrs: str | None = None
    assumptions: list[str] = field(default_factory=list)


def describe_operator(trace: Trace, event: int, name: str) -> DescribedCall:
    """Return the script of an operator call. Raises ValueError with the reason why there is none."""
    if not _OPERATOR.fullmatch(name):
        if match := _OTHER_LIBRARY.fullmatch(name):
            package = _PACKAGES.get(match[1], match[1])
            raise ValueError(f"{name} is not an operator of torch; running it needs the package {package}")
        raise ValueError(f"{name[:60]!r} is not an operator of torch{name_operator(trace, event)}")
    arguments = _read_node(trace, event) or _read_kineto(trace, event, name)
    operator = resolve_operator(arguments.schema)
    if isinstance(operator, str):
        raise ValueError(f"{name}: {operator}")
    node = {
        "inputs": arguments.inputs,
        "attrs": arguments.attrs,
        "id": 0,
        "name": name,
        "et_id": 0,
        "rf_id": 0,
    }
    storages = StorageVersions()
    step = make_step(node, operator, arguments.tensors, set(), storages)
    step.results = []
    _check_sizes(step)
    call_ns, recorded_on = measure_recorded_time(trace, event)
    recorded = RecordedTime(call_ns, 1, recorded_on, None)
    if recorded_on == "host":
        recorded = measure_equal_calls(trace, event)
    code = _OperatorCode(step, storages.bytes, arguments.has_devices)
    overload = arguments.schema.partition("(")[0].partition(".")[2].strip() or "default"
    attribute = f"{name.removeprefix('aten::')}.{overload}"
    if not all(part.isidentifier() for part in attribute.split(".")):
        raise ValueError(f"{name}: {overload[:60]!r} is not the name of an overload")
    text = code.write(
        f"torch.ops.aten.{attribute}", f"aten::{attribute}", recorded, is_below_autograd(trace, event)
    )
    calls = recorded.calls
    others = f"; median of {calls} equal calls: {format_ns(recorded.time_ns)}" if calls > 1 else ""
    facts = [*code.describe_tensors(), f"Recorded time: {format_ns(call_ns)} ({recorded_on}){others}."]
    return DescribedCall(
        "operator_script.py", f"aten::{attribute}", text, facts, arguments.assumptions + code.assumptions
    )


def _check_sizes(step: ProgramStep) -> None:
    """Raise ValueError if the sizes of arguments do not match for an operator that relies on them."""
    checks = SIZE_CHECKS.get(step.operator.name, ())
    values = {argument.name: argument.default for argument in step.operator.order}
    for argument, value in zip(step.operator.arguments, step.values, strict=False):
        items = value if isinstance(value, list) and "Tensor" in argument.kind else [value]
        converted = [
            torch.empty_strided(item.shape, item.stride, dtype=DTYPES[item.dtype], device="meta")
            if isinstance(item, TensorView)
            else convert_value(item, argument, torch.device("meta"))
            for item in (items if checks else ())
        ]
        if checks:
            values[argument.name] = converted if items is value else converted[0]
    for check in checks:
        try:
            check(values)
        except (TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{step.operator.name}: the sizes of its arguments do not match: {error}"
            ) from error


def _read_node(trace: Trace, event: int) -> _Arguments | None:
    """Return the arguments that the linked node of the execution trace has; None if none has a schema."""
    linked = trace.links.filter(pl.col("event") == event).select(id="node")
    nodes = trace.nodes.join(linked, on="id").with_columns(pl.col(pl.Categorical).cast(pl.String))
    nodes = nodes.filter(pl.col("op_schema").is_not_null() & (pl.col("op_schema") != ""))
    if nodes.is_empty():
        return None
    node = nodes.row(0, named=True)
    rows = trace.tensors.filter((pl.col("node") == node["id"]) & (pl.col("io") == 0)).sort("index", "item")
    tensors = rows.with_columns(pl.col(pl.Categorical).cast(pl.String)).to_dicts()
    if len(node["inputs"] or "") > _MAX_TEXT:
        raise ValueError("its recorded values are longer than 100,000 characters")
    assumptions = ["strides were not recorded: tensors are contiguous"] if any(
        row["stride"] is None and row["shape"] not in (None, "[]") for row in tensors
    ) else []  # fmt: skip
    return _Arguments(node["op_schema"], node["inputs"] or "[]", tensors, True, node["attrs"], assumptions)


def _read_kineto(trace: Trace, event: int, name: str) -> _Arguments:
    """Return the arguments from Kineto's Input Dims, types, strides and values, for the overload that they fit.

    Raises:
        ValueError: They were not recorded, or no overload fits.
    """
    rows = trace.arguments.filter(pl.col("event") == event).with_columns(
        pl.col(pl.Categorical).cast(pl.String)
    )
    if rows.is_empty() or rows["dims"][0] is None:
        raise ValueError(f"the shapes of {name} were not recorded; profile with record_shapes=True")
    columns = [_parse_list(rows[column][0]) for column in ("dims", "types", "strides", "concrete_inputs")]
    count = len(columns[0])
    dims, types, strides, texts = ([*column, *[None] * (count - len(column))][:count] for column in columns)
    elements = [_SPELLINGS.get(re.sub(r"c10::|\W", "", str(kind)).lower()) for kind in types]
    schema = _choose_schema(name, dims, types, elements)
    element = next((kind for kind in elements if kind is not None), "float")
    assumptions = set()
    tensors: list[dict[str, Any]] = []
    values: list[Any] = []
    for index, argument in enumerate(schema.arguments[:count]):
        kind = str(argument.real_type)
        if "Tensor" not in kind:
            values.append(_parse_value(texts[index], argument))
            continue
        nested = isinstance(dims[index], list) and any(isinstance(item, list) for item in dims[index])
        is_list = kind.startswith("List")
        if not is_list and not elements[index]:
            if types[index]:
                raise ValueError(f"unknown type {str(types[index])[:40]!r} of {argument.name}")
            values.append(None)
            continue
        shapes = dims[index] if nested else [] if is_list else [dims[index]]
        steps = strides[index] if nested else [strides[index]]
        if is_list:
            assumptions.add(f"the types of lists of tensors were not recorded: they are {element}")
        for item, shape in enumerate(shapes):
            stride = steps[item] if isinstance(steps, list) and item < len(steps) else None
            if not _is_sizes(shape):
                raise ValueError("the recorded sizes of a tensor are not a list of integers")
            if not isinstance(stride, list) or not _is_sizes(stride) or len(stride) != len(shape):
                assumptions.add("strides were not recorded: tensors are contiguous")
                stride = None
            tensors.append({
                "node": 0, "io": 0, "index": index, "item": item if is_list else None, "tensor_id": len(tensors),
                "storage_id": len(tensors), "offset": 0, "device": None, "dtype": elements[index] or element,
                "shape": json.dumps(shape), "stride": stride and json.dumps(stride),
            })  # fmt: skip
        values.append([None] * len(shapes) if is_list else None)
    return _Arguments(str(schema), json.dumps(values), tensors, False, None, sorted(assumptions))


def _choose_schema(name: str, dims: list[Any], types: list[Any], elements: list[str | None]) -> Any:
    """Return the schema of the overload that recorded arguments fit, preferably without out=; raise ValueError."""
    declared = torch._C._jit_get_schemas_for_operator(name)
    schemas = [schema for schema in declared if _fits(schema, dims, types, elements)]
    if schemas:
        return min(
            schemas, key=lambda item: (any(part.is_out for part in item.arguments), len(item.arguments))
        )
    if not declared:
        raise ValueError(f"{name} is not in this torch")
    is_short = len(dims) not in [len(schema.arguments) for schema in declared]
    raise ValueError(
        f"no overload of {name} in this torch takes the recorded arguments"
        + (f" ({len(dims)} were recorded)" if is_short else "")
    )


def _parse_list(text: str | None) -> list[Any]:
    if text is not None and len(text) > _MAX_TEXT:
        raise ValueError("its recorded values are longer than 100,000 characters")
    try:
        values = json.loads(text or "[]")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list):
        raise ValueError("its shapes or values were not recorded as a list")
    return values


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _fits(schema: Any, dims: list[Any], types: list[Any], elements: list[str | None]) -> bool:
    """Return whether arguments of these shapes and types are those of an operator's overload."""
    declared = schema.arguments
    if len(declared) < len(dims) or any(not item.has_default_value() for item in declared[len(dims) :]):
        return False
    for item, sizes, kind, dtype in zip(declared, dims, types, elements, strict=False):
        real = str(item.real_type)
        plain = real.removeprefix("Optional[")
        is_nested = kind == "TensorList" or (
            isinstance(sizes, list) and any(isinstance(x, list) for x in sizes)
        )
        if dtype is not None or is_nested:
            fits = plain.startswith("List" if is_nested else "Tensor") and "Tensor" in plain
        elif kind == "Scalar":
            fits = not plain.startswith(("Tensor", "List", "str", "Generator"))
        elif kind == "ScalarList":
            fits = plain.startswith("List") and "Tensor" not in plain
        else:
            fits = bool(kind) or real != "Tensor"
        if not fits:
            return False
    return True


def _parse_value(text: Any, declared: Any) -> Any:
    """Return the value of an argument that is not a tensor, from Kineto's text: "1", "[1, 2]", "0.", "True"."""
    plain = text.strip() if isinstance(text, str) else ""
    if not plain:
        if declared.has_default_value():
            value = declared.default_value
            return value if isinstance(value, (bool, int, float, str, type(None))) else list(value)
        if str(declared.real_type).startswith("Optional") or str(declared.real_type) == "Device":
            return None
        raise ValueError(f"the value of {declared.name} was not recorded")
    if plain[0] in "[(" and plain[-1] in "])":
        return [_parse_scalar(item.strip()) for item in plain[1:-1].split(",") if item.strip()]
    return _parse_scalar(plain)


def _parse_scalar(text: str) -> Any:
    if text in ("True", "False", "true", "false"):
        return text in ("True", "true")
    if re.fullmatch(r"[+-]?\d{1,19}", text, re.ASCII):
        return int(text)
    try:
        return text if math.isnan(number := float(text)) or math.isinf(number) else number
    except ValueError:
        raise ValueError(f"{text[:40]!r} is not a number") from None


class _OperatorCode:
    """Writes the code of an operator call: its storages, its tensors, and the call on them."""

    def __init__(self, step: ProgramStep, sizes: Mapping[int, int], has_devices: bool) -> None:
        self._step, self._sizes, self._has_devices = step, sizes, has_devices
        self._bounds = infer_bounds(Program([step], []))
        self._views: list[TensorView] = []
        self._names: list[str] = []
        self._used: dict[int, TensorView] = {}
        self.assumptions: list[str] = []

    def write(self, operator: str, name: str, call_time: RecordedTime, below_autograd: bool) -> str:
        """Return the statements that replace those of operator_script.py.

        Args:
            operator: The operator as an attribute of torch.ops.
            name: Its name.
            call_time: how long the call took.
            below_autograd: whether another operator called it.

        Raises:
            ValueError: A value has no literal.
        """
        recorded = dict(
            zip(
                (argument.name for argument in self._step.operator.arguments), self._step.values, strict=False
            )
        )
        parts = []
        for argument in self._step.operator.order:
            value = recorded.get(argument.name, argument.default)
            if argument.name not in recorded and argument.keyword:
                continue  # its default
            if argument.name in recorded and "Tensor" in argument.kind and isinstance(value, list):
                value = [item if isinstance(item, TensorView) else None for item in value]
            elif argument.name in recorded and not isinstance(value, TensorView):
                value = convert_value(value, argument, torch.device("cpu"))
            text = self._write_value(value, argument.name)
            parts.append(f"{argument.name}={text}" if argument.keyword else text)
        numbers = {storage: number for number, storage in enumerate(self._used)}
        storages = []
        for storage, view in self._used.items():
            dtype, contents = DTYPES[view.dtype], choose_contents(view, self._bounds)
            count = math.ceil(self._sizes[storage] / dtype.itemsize)
            values = f"{contents.kind!r}, {float(contents.low)!r}, {float(contents.high)!r}"
            storages.append(f"    ({count}, {dtype}, {values}),\n")
        tensors = [
            f"    ({numbers[view.storage]}, {DTYPES[view.dtype]}, {view.offset}, {view.shape}, {view.stride}, "
            f"{self._has_devices and view.on_host and call_time.basis == 'device'}),  # t[{index}]: {name}\n"
            for index, (view, name) in enumerate(zip(self._views, self._names, strict=True))
        ]
        return (
            f"NAME = {name!r}\nRECORDED_NS: int | None = {call_time.time_ns!r}\nRECORDED_CALLS = {call_time.calls}\n"
            f"RECORDED_ON = {call_time.basis!r}\nRECORDED_PAUSE_NS: int | None = {call_time.pause_ns!r}\n"
            f"BELOW_AUTOGRAD = {below_autograd}\n"
            f"OPERATOR = {operator}\n"
            "STORAGES: tuple[tuple[int, torch.dtype, str, float, float], ...] = (\n"
            f"    # elements, type, contents, from, to\n{''.join(storages)})\n"
            "TENSORS: tuple[tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...], bool], ...] = (\n"
            "    # storage, type, offset in elements, shape, strides, whether it is on the host\n"
            f"{''.join(tensors)})\n\n\n"
            "def call(t: list[torch.Tensor], device: torch.device) -> Any:\n"
            '    """Call the operator; ``t``: the tensors of TENSORS."""\n'
            f"    return OPERATOR({', '.join(parts)})\n\n\n"
        )

    def _write_value(self, value: Any, name: str) -> str:
        if isinstance(value, TensorView):
            # A number of Python is recorded as a tensor on the host; as one it would change the type of the result.
            is_number = not value.shape and value.storage not in self._step.written()
            if is_number and value.dtype in _NUMBER_LIKE and (value.on_host or not self._has_devices):
                note = "values of tensors without dimensions were not recorded: they are 0.5 or 1"
                self.assumptions += [note] if note not in self.assumptions else []
                return repr(_NUMBER_LIKE[value.dtype])
            self._used.setdefault(value.storage, value)
            if value not in self._views:
                self._views.append(value)
                self._names.append(name)
            return f"t[{self._views.index(value)}]"
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._write_value(item, name) for item in value)}]"
        raise ValueError(f"the value of {name} is of a type that has no literal")

    def describe_tensors(self) -> list[str]:
        """Return a line for each tensor of the call."""
        return [
            f"`t[{index}]` ({name}): {DTYPES[view.dtype]}, shape {list(view.shape)}, strides {list(view.stride)}"
            for index, (view, name) in enumerate(zip(self._views, self._names, strict=True))
        ]


# A recorded call as the code and text of the folder that runs it again, and its recorded time.


@dataclass
class DescribedCall:
    """A recorded call as the code and text of its folder.

    Attributes:
        template: The script that the code becomes part of.
        name: Operator or collective.
        code: Statements that replace those of the template.
        facts: Lines for the README.
        assumptions: What was not recorded, and is assumed.
        start: Command that runs the script.
    """

    template: str
    name: str
    code: str
    facts: list[str]
    assumptions: list[str]
    start: str = "python repro.py"


def name_operator(trace: Trace, event: int) -> str:
    """Return a hint at an operator that an event contains, or that launched or contains it."""
    events = trace.events.select("id", "parent", pl.col("name", "cat").cast(pl.String))
    operators = events.filter(pl.col("cat").is_in(list(categories.OPERATOR_CATEGORIES)))
    launched = trace.launches.filter(pl.col("device_event") == event)["operator"].drop_nulls()
    above = events.filter(pl.col("id") == event)["parent"].drop_nulls()
    inside = operators.filter(pl.col("parent") == event).head(1)
    around = operators.filter(pl.col("id").is_in((launched if launched.len() else above).implode()))
    for relation, rows in (("contains", inside), ("belongs to", around)):
        for row in rows.head(1).iter_rows(named=True):
            return f"; it {relation} event {row['id']} ({(row['name'] or '')[:60]!r})"
    return ""


class RecordedTime(NamedTuple):
    """How long an operator took in the recording.

    Attributes:
        time_ns: median time of the equal calls.
        calls: their number.
        basis: where the time was measured, "device" or "host".
        pause_ns: median time on the thread since the operator's last call, with whatever arguments, in which other
            code evicts its own from the processor's caches; None for a single call, and for a device.
    """

    time_ns: int | None
    calls: int
    basis: str
    pause_ns: int | None


def measure_equal_calls(trace: Trace, event: int) -> RecordedTime:
    """Return the time of all calls of an operator on the host with equal arguments, within events of the same name."""
    arguments = trace.arguments.select(pl.exclude("event"), id="event")
    names = trace.events.select(parent="id", caller="name")
    calls = trace.events.filter(pl.col("name") == pl.col("name").filter(pl.col("id") == event).first())
    end = (pl.col("ts") + pl.col("dur")).shift().over("pid", "tid")
    calls = calls.select("id", "dur", "parent", pause=(pl.col("ts") - end).clip(0))
    calls = calls.join(names, on="parent", how="left", maintain_order="left").drop("parent")
    calls = calls.join(arguments, on="id", how="left")
    keys = ["caller", *(name for name in arguments.columns if name != "id")]
    equal = calls.join(
        calls.filter(pl.col("id") == event).select(keys), on=keys, nulls_equal=True, how="semi"
    )
    time_ns, pause_ns = (
        round(median) if isinstance(median := equal[column].median(), float) else None
        for column in ("dur", "pause")
    )
    return RecordedTime(time_ns, equal["dur"].count(), "host", pause_ns)


def is_below_autograd(trace: Trace, event: int) -> bool:
    """Return whether an operator was called by the kernel of another one, which has passed autograd already.

    Operators that only consist of others (CompositeImplicitAutograd, such as aten::linear) call these in front of it.
    """
    events = trace.events
    parents = rows_of_ids(events, events["parent"])
    above = parents[rows_of_ids(events, pl.Series([event], dtype=pl.UInt32))[0]]
    while above >= 0:
        name = events["name"][int(above)]
        if name and _OPERATOR.fullmatch(name) and not _is_composite(name):
            return True
        above = parents[above]
    return False


def _is_composite(name: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(name)
    overloads = [f"{name}.{schema.overload_name}".removesuffix(".") for schema in schemas]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # Overloads of TorchScript alone, such as aten::add.t, are not dispatched.
    dispatched = (overload for overload in overloads if torch._C._dispatch_has_kernel(overload))
    return any(has_kernel(overload, "CompositeImplicitAutograd") for overload in dispatched)


def measure_recorded_time(trace: Trace, event: int) -> tuple[int | None, str]:
    """Return the time in ns of an operator call, and where it was measured: of its GPU activity, else of the host."""
    row = trace.events.filter(pl.col("id") == event).select("ts", "dur", "pid", "tid").row(0, named=True)
    inside = pl.col("id") == event
    if row["ts"] is not None and row["dur"] is not None:
        inside |= (
            (pl.col("pid") == row["pid"])
            & (pl.col("tid") == row["tid"])
            & pl.col("ts").is_between(row["ts"], row["ts"] + row["dur"])
        )
    inner = trace.events.filter(inside).select("id")
    launches = trace.launches.join(inner, left_on="operator", right_on="id", how="semi")
    if trace.events.filter(pl.col("id") == event)["cat"].cast(pl.String)[0] == categories.CAPTURED_OPERATOR:
        first = (
            launches["launch"].drop_nulls().head(1)
        )  # a captured operator runs in each replay of its graph
        launches = launches.join(first.to_frame("launch"), on="launch", how="semi")
    work = trace.events.join(launches, left_on="id", right_on="device_event", how="semi")
    work = work.drop_nulls(["ts", "dur"])
    if work.height:
        starts = work["ts"].to_numpy()
        return Intervals.of(starts, starts + work["dur"].to_numpy()).total, "device"
    return row["dur"], "host"


def format_ns(time_ns: int | None) -> str:
    return "unknown" if time_ns is None else f"{time_ns / 1e3:.3f} us"
