"""Estimates FLOPs and bytes of XLA's operations from the programs (HloProto) that a profile contains.

flops:

- dot, convolution, and calls of cuBLAS and cuDNN for these: 2 per multiply-add
- fused attention (TransformerEngine, cuDNN): the same, for the pairs that the mask keeps
- elementwise operation: 1 per element; reduction: 1 per element of the input
- fusion: the sum over its operations
- others (other custom calls, sort, ...): unknown; these operations have bytes only

bytes: each operand and result counts once; scratch memory does not count. If a fusion only slices an operand, the
slices count; if it updates a buffer in place, the update counts.

Messages and field numbers: xla/service/hlo.proto and xla/xla_data.proto of openxla/xla.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from etloom.formats.io.protobuf_fields import LENGTH, VARINT, Fields, MessageData

_MODULE, _MODULE_COMPUTATIONS = 1, 3
_COMPUTATION_INSTRUCTIONS, _COMPUTATION_ID, _COMPUTATION_ROOT = 2, 5, 6
_NAME, _OPCODE, _SHAPE, _ID, _OPERANDS, _CALLED = 1, 2, 3, 35, 36, 38
_PARAMETER, _CONVOLUTION, _TARGET, _DOT, _CONFIG = 9, 16, 28, 30, 43
_SHAPE_TYPE, _SHAPE_DIMENSIONS, _SHAPE_TUPLE = 2, 3, 4
_DOT_CONTRACTED, _KERNEL_OUTPUT_FEATURE = 1, 4
_MAX_DIMENSIONS = 64
_MAX_DEPTH = 16
"""Tuples in tuples that are followed."""
_MAX_COUNT = 1 << 56
"""Upper limit of FLOPs and bytes, so that sums fit into 64 bits."""
_TYPES = {
    1: (8, "bool"),
    2: (8, "int8"),
    3: (16, "int16"),
    4: (32, "int"),
    5: (64, "long"),
    6: (8, "uint8"),
    7: (16, "uint16"),
    8: (32, "uint32"),
    9: (64, "uint64"),
    10: (16, "half"),
    11: (32, "float"),
    12: (64, "double"),
    15: (64, "complex64"),
    16: (16, "bfloat16"),
    18: (128, "complex128"),
    19: (8, "float8_e5m2"),
    20: (8, "float8_e4m3fn"),
    21: (4, "int4"),
    22: (4, "uint4"),
    24: (8, "float8_e5m2fnuz"),
    25: (8, "float8_e4m3fnuz"),
    28: (8, "float8_e4m3"),
    32: (4, "float4_e2m1fn"),
    33: (8, "float8_e8m0fnu"),
}
"""XLA's number of a type -> its bits, and PyTorch's name, which peaks of devices are listed by."""
_FREE = frozenset(
    [
        "parameter",
        "constant",
        "bitcast",
        "bitcast-convert",
        "tuple",
        "get-tuple-element",
        "reshape",
        "broadcast",
        "transpose",
        "copy",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "concatenate",
        "pad",
        "iota",
        "gather",
        "reverse",
        "optimization-barrier",
        "after-all",
        "all-gather",
        "all-to-all",
        "collective-permute",
        "all-reduce",
        "reduce-scatter",
    ]
)
"""Operations without arithmetic on their elements, or that communicate."""
_REDUCTIONS = frozenset({"reduce", "reduce-window", "map"})
_UNKNOWN = frozenset(
    {"custom-call", "sort", "scatter", "fft", "triangular-solve", "cholesky", "while", "conditional"}
)
_SCRATCH_TYPES = ("int8", "uint8")
_ATTENTION = re.compile(r"te_fused_attn_(forward|backward)_ffi|__cudnn\$fmha\w*?(Backward)?(?:F8)?$")
_TE_SIZES = re.compile(r"\b(\w+) = (-?\d{1,12}) : i64")
_TE_CAUSAL = (2, 3, 4, 5)
"""Numbers of TransformerEngine's causal masks."""
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})


@dataclass(frozen=True)
class Shape:
    """Type, dimensions and bytes of an array. A tuple has type and dimensions of its first array, and the bytes of all.

    ``scratch``: bytes of arrays in a tuple that libraries use as scratch memory.
    """

    dtype: str | None
    dimensions: tuple[int, ...]
    bytes: int
    scratch: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.dimensions)


@dataclass(frozen=True)
class Instruction:
    """An operation of a program; ``operands`` and ``called`` are ids of instructions and of computations."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[int, ...]
    called: tuple[int, ...]
    parameter: int
    target: str
    attributes: tuple[int, ...]
    """The contracted dimensions of a dot's first operand, or the kernel's output dimension of a convolution."""
    config: str
    """The configuration of a custom call."""


@dataclass(frozen=True)
class Estimate:
    """FLOPs (None if unknown) and bytes of one run of an operation, its opcode and the type of its arithmetic."""

    flops: int | None
    bytes: int
    opcode: str
    dtype: str | None


@dataclass(frozen=True)
class Computation:
    """A list of operations, by id, of which ``root`` returns the result."""

    instructions: dict[int, Instruction]
    root: int

    @cached_property
    def traffic(self) -> tuple[dict[int, int], int | None]:
        """The bytes that a fusion reads of each parameter, and those that it updates in place, if it does.

        Of parameters that are only sliced, the slices are read.
        """
        inside = self.instructions
        users: dict[int, list[Instruction]] = {}
        for instruction in inside.values():
            for number in instruction.operands:
                users.setdefault(number, []).append(instruction)
        last = inside.get(self.root)
        updates = (
            [inside[number] for number in last.operands[:2] if number in inside] if last is not None else []
        )
        in_place = last is not None and last.opcode == "dynamic-update-slice" and len(updates) == 2
        read: dict[int, int] = {}
        for number, instruction in inside.items():
            using = users.get(number, [])
            is_target = in_place and instruction is updates[0] and len(using) == 1
            if instruction.opcode != "parameter" or is_target:
                continue
            is_sliced = using and all(user.opcode in _SLICES and user.operands[0] == number for user in using)
            sliced = sum(user.shape.bytes for user in using)
            size = min(sliced, instruction.shape.bytes) if is_sliced else instruction.shape.bytes
            read[instruction.parameter] = read.get(instruction.parameter, 0) + size
        return read, updates[1].shape.bytes if in_place else None


def estimate_program(messages: MessageData, start: int, end: int) -> dict[str, Estimate]:
    """Return the estimate of each operation of a program (an HloProto in a range of bytes), by its name."""
    proto = messages.scan(np.array([start]), np.array([end])).select(_MODULE, LENGTH)
    module = messages.scan(proto.start[:1], proto.ends[:1])
    estimator = _Estimator(_read_computations(messages, module.select(_MODULE_COMPUTATIONS, LENGTH)))
    return {
        instruction.name: estimator.estimate(instruction, computation.instructions)
        for computation in estimator.computations.values()
        for instruction in computation.instructions.values()
    }


def _read_computations(messages: MessageData, spans: Fields) -> dict[int, Computation]:
    fields = messages.scan(spans.start, spans.ends)
    count = spans.start.size
    ids, roots = (fields.get_integers(number, count) for number in (_COMPUTATION_ID, _COMPUTATION_ROOT))
    computations = {
        number: Computation({}, root) for number, root in zip(ids.tolist(), roots.tolist(), strict=True)
    }
    instructions = fields.select(_COMPUTATION_INSTRUCTIONS, LENGTH)
    for owner, number, instruction in _read_instructions(messages, instructions):
        computations[int(ids[owner])].instructions[number] = instruction
    return computations


def _read_instructions(messages: MessageData, spans: Fields) -> Iterator[tuple[int, int, Instruction]]:
    """Yield the index of the computation, the id, and the instruction, of each span."""
    fields = messages.scan(spans.start, spans.ends)
    count = spans.start.size
    texts = {
        number: _read_texts(messages, fields, number, count) for number in (_NAME, _OPCODE, _TARGET, _CONFIG)
    }
    ids, parameters = (fields.get_integers(number, count).tolist() for number in (_ID, _PARAMETER))
    shapes = _read_shapes(messages, fields.select(_SHAPE, LENGTH), count)
    operands, called = (_read_lists(messages, fields, number, count) for number in (_OPERANDS, _CALLED))
    attributes: list[tuple[int, ...]] = [()] * count
    for number, inner in ((_DOT, _DOT_CONTRACTED), (_CONVOLUTION, _KERNEL_OUTPUT_FEATURE)):
        parts = fields.select(number, LENGTH)
        content = messages.scan(parts.start, parts.ends)
        values = _read_lists(messages, content, inner, parts.start.size)
        for row, value in zip(parts.message.tolist(), values, strict=True):
            # An output dimension of 0 is absent.
            attributes[row] = value if number == _DOT else (value or (0,))
    for row in range(count):
        target = texts[_TARGET][row]
        if "matmul" in target or "gemm" in target:
            attributes[row] = _read_contracted(texts[_CONFIG][row])
        instruction = Instruction(
            texts[_NAME][row], texts[_OPCODE][row], shapes[row], operands[row], called[row],
            parameters[row], target, attributes[row], texts[_CONFIG][row] if target else "",
        )  # fmt: skip
        yield int(spans.message[row]), ids[row], instruction


def _read_contracted(config: str) -> tuple[int, ...]:
    """Return the contracted dimensions in the configuration (JSON) of a call of a library."""
    try:
        values = json.loads(config)["gemm_backend_config"]["dot_dimension_numbers"][
            "lhs_contracting_dimensions"
        ]
        return tuple(int(value) for value in values)
    except (ValueError, TypeError, LookupError, RecursionError):
        return ()


def _read_texts(messages: MessageData, fields: Fields, number: int, count: int) -> list[str]:
    texts = [""] * count
    spans = fields.select(number, LENGTH)
    for row, text in zip(spans.message.tolist(), messages.read_texts(spans), strict=True):
        texts[row] = text
    return texts


def _read_lists(messages: MessageData, fields: Fields, number: int, count: int) -> list[tuple[int, ...]]:
    """Return a repeated integer field of each message, packed or not."""
    lists: list[list[int]] = [[] for _ in range(count)]
    packed, plain = fields.select(number, LENGTH), fields.select(number, VARINT)
    for row, value in zip(plain.message.tolist(), plain.value.view(np.int64).tolist(), strict=True):
        lists[row].append(value)
    for row, start, end in zip(
        packed.message.tolist(), packed.start.tolist(), packed.ends.tolist(), strict=True
    ):
        at = start
        with suppress(IndexError, ValueError):
            while at < end:
                value, at = messages.read_varint(at)
                lists[row].append(value)
    return [tuple(values) for values in lists]


def _read_shapes(messages: MessageData, spans: Fields, count: int, depth: int = 0) -> list[Shape]:
    """Return the shape of each of ``count`` messages."""
    shapes = [Shape(None, (), 0)] * count
    fields = messages.scan(spans.start, spans.ends)
    types = fields.get_integers(_SHAPE_TYPE, spans.start.size).tolist()
    dimensions = _read_lists(messages, fields, _SHAPE_DIMENSIONS, spans.start.size)
    for row, kind, sizes in zip(spans.message.tolist(), types, dimensions, strict=True):
        bits, name = _TYPES.get(kind, (0, None))
        if len(sizes) <= _MAX_DIMENSIONS:
            shapes[row] = Shape(name, sizes, (math.prod(sizes) * bits + 7) // 8)
    parts = fields.select(_SHAPE_TUPLE, LENGTH)
    if parts.start.size and depth < _MAX_DEPTH:
        owners = spans.message[parts.message].tolist()
        numbered = Fields(np.arange(parts.start.size), parts.number, parts.wire, parts.value, parts.start)
        for owner, shape in zip(
            owners, _read_shapes(messages, numbered, parts.start.size, depth + 1), strict=True
        ):
            outer = shapes[owner]
            first = outer if outer.dtype else shape
            is_scratch = shape.dtype in _SCRATCH_TYPES and len(shape.dimensions) == 1
            scratch = outer.scratch + (shape.bytes if is_scratch else shape.scratch)
            shapes[owner] = Shape(first.dtype, first.dimensions, outer.bytes + shape.bytes, scratch)
    return shapes


class _Estimator:
    """Estimates operations of one program, in which called computations precede their callers."""

    def __init__(self, computations: Mapping[int, Computation]) -> None:
        self.computations = computations
        self._sums: dict[int, tuple[int | None, str | None]] = {}
        for number, computation in computations.items():
            self._sums[number] = self._sum_flops(computation)

    def estimate(self, instruction: Instruction, siblings: Mapping[int, Instruction]) -> Estimate:
        operands = [siblings[number] for number in instruction.operands if number in siblings]
        read = sum(operand.shape.bytes for operand in operands)
        written = instruction.shape.bytes - (instruction.shape.scratch if instruction.target else 0)
        dtype = operands[0].shape.dtype if operands else None
        called = self.computations.get(instruction.called[0]) if instruction.called else None
        if instruction.opcode == "fusion" and called is not None:
            flops, inner_dtype = self._sums.get(instruction.called[0], (None, None))
            dtype = inner_dtype or dtype
            reads, updated = called.traffic
            read = sum(reads.get(number, 0) for number in range(len(operands)))
            written = instruction.shape.bytes if updated is None else updated
        else:
            flops = _count_flops(instruction, operands)
            if instruction.opcode in _SLICES:
                read = written
            elif instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
                read = written = operands[1].shape.bytes
        flops = flops if flops is None or flops < _MAX_COUNT else None
        return Estimate(flops, min(read + written, _MAX_COUNT), instruction.opcode, dtype)

    def _sum_flops(self, computation: Computation) -> tuple[int | None, str | None]:
        """Return the FLOPs of a computation's operations, and the type of the factors of its products, if any."""
        inside = computation.instructions
        parts = [self.estimate(instruction, inside) for instruction in inside.values()]
        types = [part.dtype for part in parts if part.opcode in ("dot", "convolution")]
        counts = [part.flops for part in parts if part.flops is not None]
        return sum(counts) if len(counts) == len(parts) else None, types[0] if types else None


def _count_flops(instruction: Instruction, operands: list[Instruction]) -> int | None:
    shapes = [operand.shape for operand in operands]
    result = instruction.shape
    opcode, target = instruction.opcode, instruction.target
    if opcode == "dot" or "matmul" in target or "gemm" in target:
        return _count_product(instruction, shapes)
    if opcode == "convolution" or target.startswith("__cudnn$conv"):
        return _count_convolution(instruction, shapes)
    if match := _ATTENTION.match(target):
        return _count_attention(
            instruction, shapes, is_backward="backward" in (match[1] or match[2] or "").lower()
        )
    if opcode in _UNKNOWN:
        return None
    if opcode in _FREE or opcode.endswith(("-start", "-done", "-update")):
        return 0
    return shapes[0].numel if opcode in _REDUCTIONS and shapes else result.numel


def _count_product(instruction: Instruction, shapes: list[Shape]) -> int | None:
    if len(shapes) < 2 or not instruction.attributes:
        return None
    sizes = shapes[0].dimensions
    if any(not 0 <= at < len(sizes) for at in instruction.attributes):
        return None
    return 2 * instruction.shape.numel * math.prod(sizes[at] for at in instruction.attributes)


def _count_convolution(instruction: Instruction, shapes: list[Shape]) -> int | None:
    """Return 2 FLOPs per element of the forward operator's result and weight that applies to it."""
    if len(shapes) < 2 or not instruction.attributes:
        return None
    places, kernel = instruction.shape, shapes[1]
    if "BackwardInput" in instruction.target:
        places = shapes[0]
    elif "BackwardFilter" in instruction.target:
        places, kernel = shapes[1], instruction.shape
    (at,) = instruction.attributes
    if not 0 <= at < len(kernel.dimensions) or not kernel.dimensions[at]:
        return None
    return 2 * places.numel * kernel.numel // kernel.dimensions[at]


def _count_attention(instruction: Instruction, shapes: list[Shape], is_backward: bool) -> int | None:
    """Return the FLOPs of fused attention; in backward the scores are computed again."""
    try:
        batch, heads, queries, keys, size, value_size, is_causal = _read_attention(instruction.config, shapes)
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    if min(batch, heads, queries, keys, size, value_size) <= 0:
        return None
    shorter = min(queries, keys)
    pairs = shorter * (shorter + 1) // 2 + (queries - shorter) * keys if is_causal else queries * keys
    products = 3 * size + 2 * value_size if is_backward else size + value_size
    return 2 * batch * heads * pairs * products


def _read_attention(config: str, shapes: list[Shape]) -> tuple[int, int, int, int, int, int, bool]:
    """Return batch, heads, queries, keys, sizes of keys and values, and whether the mask is causal, of a configuration.

    TransformerEngine's is a dictionary of MLIR, cuDNN's is JSON.
    """
    if config.lstrip().startswith("{attn_heads") or "q_max_seqlen" in config:
        sizes = {key: int(value) for key, value in _TE_SIZES.findall(config)}
        keys = ("input_batch", "attn_heads", "q_max_seqlen", "kv_max_seqlen", "qk_head_dim", "v_head_dim")
        if sizes.get("window_size_left", -1) != -1:
            raise ValueError
        batch, heads, queries, lengths, size, value_size = (sizes[key] for key in keys)
        return batch, heads, queries, lengths, size, value_size, sizes["mask_type"] in _TE_CAUSAL
    content = json.loads(config)["cudnn_fmha_backend_config"]
    batch, heads, queries, lengths = map(int, content["intermediate_tensor_shape"]["dimensions"])
    (contracted,) = map(int, content["bmm1_dot_dimension_numbers"]["lhs_contracting_dimensions"])
    size = shapes[0].dimensions[contracted]
    return batch, heads, queries, lengths, size, size, "CAUSAL" in content["mask_type"]


def to_values(estimate: Estimate) -> dict[str, Any]:
    """Return the values under which a TPU's profile states them, without unknown ones."""
    values = {
        "flops": estimate.flops,
        "bytes_accessed": estimate.bytes,
        "hlo_category": estimate.opcode,
        "element_type": estimate.dtype,
    }
    return {key: value for key, value in values.items() if value is not None}
