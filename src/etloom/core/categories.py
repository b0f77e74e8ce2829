"""Derives the meaning of names: event categories, kernel types, communication, collectives, element types.

The only place that derives meaning from a name; all other code calls it. A vendor with a new spelling is one more
line here and one more row in tests/core/test_categories.py.

Categories: Kineto's ActivityType.h, and the spellings of profilers before Kineto ("Kernel", "Operator", ...).
Kernel names: those of NCCL, RCCL, HCCL, oneCCL, MSCCL, NVSHMEM, DeepEP, MORI, UCCL, PyTorch's symmetric memory, vLLM,
TensorRT-LLM and MTIA. A kernel is classified by its own identifier, never by its argument types.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from etloom.core import names, text_codes
from etloom.core.arrays import is_in, match_text, take_rows

if TYPE_CHECKING:
    from etloom.core.trace import Trace

OPERATOR_CATEGORIES = frozenset({"cpu_op", "Operator"})
"""Categories of operators on the host."""
ANNOTATION_CATEGORIES = frozenset({"user_annotation"})
"""Categories of ranges that the program itself named, on the host."""
RUNTIME_CATEGORIES = frozenset(
    {
        *("cuda_runtime", "cuda_driver", "Runtime", "mtia_runtime", "glow_runtime", "hpu_op"),
        *("xpu_runtime", "xpu_driver", "privateuse1_runtime", "privateuse1_driver"),
    }
)
"""Categories of calls of a device's runtime or driver, which launch GPU activity."""
PYTHON_CATEGORIES = frozenset({"python_function", "Python"})
"""Categories of Python frames."""
HOST_CATEGORIES = OPERATOR_CATEGORIES | ANNOTATION_CATEGORIES | RUNTIME_CATEGORIES | PYTHON_CATEGORIES
"""Categories of events that nest on a host thread."""

CAPTURED_GRAPH, CAPTURED_OPERATOR, CAPTURED_CALL = "captured_graph", "captured_op", "captured_call"
CAPTURED_CATEGORIES = {
    **dict.fromkeys(OPERATOR_CATEGORIES, CAPTURED_OPERATOR),
    **dict.fromkeys(RUNTIME_CATEGORIES, CAPTURED_CALL),
    **dict.fromkeys(ANNOTATION_CATEGORIES, "captured_annotation"),
    **dict.fromkeys(PYTHON_CATEGORIES, "captured_function"),
}
"""Category of a host event -> category of the event without a time that stands for it in each replay of the device
graph that it captured. The outermost of these events is the `CAPTURED_GRAPH`."""
CAPTURED = frozenset({CAPTURED_GRAPH, *CAPTURED_CATEGORIES.values()})

MEMCPY_CATEGORIES = frozenset({"gpu_memcpy", "Memcpy"})
MEMSET_CATEGORIES = frozenset({"gpu_memset", "Memset"})
MTIA_CATEGORIES = frozenset({"mtia_ccp_events"})
DEVICE_CATEGORIES = frozenset({"kernel", "Kernel"}) | MEMCPY_CATEGORIES | MEMSET_CATEGORIES | MTIA_CATEGORIES
"""Categories of GPU activity, which exclude synchronizations (cuda_sync) and gpu_user_annotation."""

GRAPH_LAUNCH = r"GraphLaunch"
"""Part of the names of runtime calls that replay a device graph (cudaGraphLaunch, hipGraphLaunch, cuGraphLaunch)."""
NCCL_COLLECTIVE = "nccl_collective"
"""Category of a communication that NCCL's own profilers recorded."""

MPI_CALL = r"^MPI_[A-Z]"
"""Matches calls of MPI."""

PIPELINE_OPERATION = "pipeline_operation"
"""Category of an operation of a pipeline, such as forward-compute, in a trace that holds nothing smaller."""

KERNEL_TYPES = ("computation", "communication", "memory", "other")
"""Types of GPU activity; in a trace without GPU activity, types of operators."""

KERNEL_TYPE_DTYPE = pl.Enum(KERNEL_TYPES)

_COLLECTIVE = r"(?i:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
_WORD_CHARACTERS = "0-9A-Za-z_\x80-\U0010ffff"
WORD = f"[{_WORD_CHARACTERS}]"
"""For patterns that polars evaluates: it takes ten times as long to compile \\w, which knows the letters of all
scripts. Here any character beyond ASCII is a letter."""
ANONYMOUS_NAMESPACE = r"(?:\(anonymous namespace\)|<unnamed>)::"
"""A scope without a name, as CUPTI and Nsight Systems spell it."""
# Up to a kernel's own identifier: "void at::native::(anonymous namespace)::".
_SCOPE = rf"^(?:void\s+)?(?:{ANONYMOUS_NAMESPACE}|[A-Za-z_]{WORD}*::)*"
_COMMUNICATION_KERNEL = "|".join(
    (
        # NCCL (ncclKernel_, ncclDevKernel_, ncclSymDevKernel_), RCCL, HCCL, MSCCL, oneCCL, NVSHMEM
        rf"{_SCOPE}(?:nccl|rccl|hccl|hcom|msccl|oneccl|nvshmem|rocshmem)",
        # Custom ones: vLLM, SGLang, aiter, TensorRT-LLM, FlashInfer, PyTorch's symmetric memory
        rf"{_SCOPE}{WORD}*{_COLLECTIVE}",
        rf"{_SCOPE}cross_device_reduce",
        # Libraries that do nothing else: DeepEP (dpsk::ep in DeepSeek's own traces), MORI, MSCCL++, oneCCL, UCCL
        r"^(?:void\s+)?(?:deep_ep|dpsk::ep|mori|mscclpp|ccl|uccl)::",
        # XLA's operations on TPU: all-gather-start.2, collective-permute.1
        r"^(?:ragged-)?(?:all-(?:reduce|gather|to-all)|reduce-scatter|collective-(?:permute|broadcast)|send|recv)"
        r"(?:-start|-done|-fusion)?(?:\.\d+)*$",
        # MTIA
        r"^collective_subgraph_execution",
    )
)
# Inductor names a fused kernel after all it came from (triton_poi_fused_all_gather_into_tensor_3), and a
# matrix product that also communicates does the model's arithmetic. DeepEP counts tokens per rank before it sends.
_COMPUTATION_KERNEL = (
    rf"^triton_{WORD}*fused|{_SCOPE}{WORD}*(?i:gemm|matmul)|^(?:void\s+)?(?:deep_ep|dpsk::ep)::layout::"
)
# CUDA, HIP and nvprof; roctracer; ROCclr's blit kernels, which come as plain kernels; XLA on TPU.
_MEMORY = (
    r"^(?:hip)?Mem(?:cpy|set)|^\[CUDA mem"
    r"|^Copy(?:Host|Device)To|^FillBuffer|^__amd_rocclr_(?:copy|fill)Buffer|^copy-(?:start|done)(?:\.\d+)*$"
)
_PARAMETER_LIST = r"[(<].*$"
_MTIA_MEMORY = r"^dma"
_MTIA_OTHER = r"^(?:runFunction|job_exe|packet|pe_exe|cpum_exe_subgraph)"

# What a backend reports from inside a collective. It starts on the caller's thread and may end on another.
BACKEND_RANGE = r"^(?:gloo|nccl|rccl|ucc|mpi|hccl|xccl|ccl|cncl|eccl):"
"""Matches the names of `is_backend_range`."""
# fsdp::all_gather_copy_in fills a local buffer. Spelled out, since polars' expressions cannot look ahead: not "cop...".
_NOT_COPY = (
    rf"(?:_?(?:[abd-zA-Z0-9]{WORD}*|c(?:[a-np-z0-9]{WORD}*|o(?:[a-oq-z0-9]{WORD}*)?)?)|_)?"
    rf"(?:[^{_WORD_CHARACTERS}]|$)"
)
_CALL = (
    rf"^_?c10d(?:_functional(?:_autograd)?)?::|^record_param_comms$|^{WORD}+::{WORD}*{_COLLECTIVE}{_NOT_COPY}"
)
COMMUNICATION_CALL = f"{_CALL}|{BACKEND_RANGE}"
"""Matches the names of `is_communication`."""


def mask_events(events: pl.DataFrame, categories: Collection[str]) -> np.ndarray:
    """Return a mask of the events whose category is one of ``categories``."""
    return is_in(events["cat"], categories)


def match_names(events: pl.DataFrame, pattern: str, within: np.ndarray | None = None) -> np.ndarray:
    """Return a mask of the events whose name contains a match of a regular expression, as `arrays.match_text` does.

    Args:
        events: The events; a name that is null does not match.
        pattern: The regular expression.
        within: Mask of the events to look at; the others do not match.
    """
    return match_text(events["name"], pattern, within)


def kernel_type(cat: pl.Expr | None = None, name: pl.Expr | None = None) -> pl.Expr:
    """Return an expression for the type of a device event, one of `KERNEL_TYPES`; see `add_kernel_type` for speed.

    Memcpy and memset are recognized by category or name. Of the rest, collectives and sends between devices are
    communication, MTIA's bookkeeping is other, and everything else is computation.

    Args:
        cat: Expression of the category (default: the column ``cat``).
        name: Expression of the name (default: the column ``name``).

    Returns:
        An expression named ``kind``; null for events that are not GPU activity.
    """
    cat = (pl.col("cat") if cat is None else cat).cast(pl.String)
    name = (pl.col("name") if name is None else name).cast(pl.String)
    mtia = cat.is_in(list(MTIA_CATEGORIES))
    return (
        pl.when(cat.is_in(list(DEVICE_CATEGORIES)).fill_null(False).not_())
        .then(None)
        .when(cat.is_in(list(MEMCPY_CATEGORIES | MEMSET_CATEGORIES)) | name.str.contains(_MEMORY))
        .then(pl.lit("memory"))
        .when(_is_communication_kernel(name))
        .then(pl.lit("communication"))
        .when(mtia & name.str.contains(_MTIA_MEMORY))
        .then(pl.lit("memory"))
        .when(mtia & name.str.contains(_MTIA_OTHER))
        .then(pl.lit("other"))
        .otherwise(pl.lit("computation"))
        .cast(KERNEL_TYPE_DTYPE)
        .alias("kind")
    )


def _is_communication_kernel(name: pl.Expr) -> pl.Expr:
    """Return an expression that is true for names of kernels that communicate; users can add name patterns."""
    more = [row["pattern"].pattern for row in names.list_names("communication")]
    by_table = (
        name.str.replace_all(ANONYMOUS_NAMESPACE, "")
        .str.replace(_PARAMETER_LIST, "")
        .str.contains("|".join(more))
    )
    return (name.str.contains(_COMMUNICATION_KERNEL) | by_table) & ~name.str.contains(_COMPUTATION_KERNEL)


def recorded_extent() -> tuple[pl.Expr, pl.Expr]:
    """Return expressions for the first start and last end (ns) of events, without the profiler's; null if none."""
    work = is_profiler_internal().not_()
    end = pl.col("ts") + pl.col("dur").fill_null(0)
    return pl.col("ts").filter(work).min(), end.filter(work).max()


def count_events(trace: Trace) -> pl.DataFrame:
    """Count the events of each category on each device, and measure their extent.

    Returns:
        A row per category and device. Columns: cat, device, count, first_ts and last_ts (start of the first and of the
        last event), end, work_start and work_end (see `recorded_extent`); times in ns, null if no event has one.
    """
    work_start, work_end = recorded_extent()
    ts = pl.col("ts")
    query = (
        trace.scan("events")
        .group_by("cat", "device")
        .agg(
            count=pl.len().cast(pl.Int64),
            first_ts=ts.min(),
            last_ts=ts.max(),
            end=(ts + pl.col("dur").fill_null(0)).max(),
            work_start=work_start,
            work_end=work_end,
        )
    )
    counts = query.collect(engine=trace.engine).with_columns(pl.col("cat").cast(pl.String))
    return counts.sort("cat", "device")


def is_profiler_internal() -> pl.Expr:
    """Return an expression that is true for events that Kineto writes about itself.

    They may begin seconds before the recorded work or end after it: the span of the recording (category Trace,
    "PyTorch Profiler (0)") and instants without a category ("Record Window End").
    """
    is_internal = (pl.col("cat") == "Trace") | (pl.col("cat").is_null() & pl.col("ph").is_in(["i", "I"]))
    return is_internal.fill_null(False)


def add_kernel_type(events: pl.DataFrame) -> pl.DataFrame:
    """Return events with a column ``kind``, one of `KERNEL_TYPES`; computed once per distinct category and name."""
    cats, texts = (events[column].cast(pl.Categorical) for column in ("cat", "name"))
    user_files = names.list_user_files()
    kinds = np.full(events.height, -1)
    rows, positions = text_codes.find_distinct(text_codes.read_codes(cats))
    for position, category in enumerate(take_rows(cats, rows).to_list()):
        selected = np.flatnonzero(positions == position)
        if category in MEMCPY_CATEGORIES | MEMSET_CATEGORIES:
            kinds[selected] = KERNEL_TYPES.index("memory")
        elif category in DEVICE_CATEGORIES:
            kinds[selected] = text_codes.compute_numbers(
                take_rows(texts, selected), number_kernel_type, category, user_files
            )
    return events.hstack([take_rows(pl.Series("kind", KERNEL_TYPES, dtype=KERNEL_TYPE_DTYPE), kinds)])


def number_kernel_type(name: pl.Expr, category: str, user_files: tuple[str, ...]) -> pl.Expr:
    """Return an expression for a kernel's index in `KERNEL_TYPES`; ``user_files`` serves as a key of caches."""
    return kernel_type(pl.lit(category), name).to_physical()


def is_communication(name: pl.Expr | None = None) -> pl.Expr:
    """Return an expression that is true for communication calls (c10d::, ...) and ranges of a backend (gloo:, ...)."""
    name = (pl.col("name") if name is None else name).cast(pl.String)
    return name.str.contains(COMMUNICATION_CALL)


def is_backend_range(name: pl.Expr | None = None) -> pl.Expr:
    """Return an expression that is true for a range that a backend records for a collective (gloo:, ...).

    Such ranges may overlap other events of their thread without nesting.
    """
    name = (pl.col("name") if name is None else name).cast(pl.String)
    return name.str.contains(BACKEND_RANGE)


# For Python, which takes long to compile a range of nearly all characters, and not for \w.
_COMMUNICATION = rf"{BACKEND_RANGE}|{_CALL}|{_COMMUNICATION_KERNEL}|^[a-z_]+$".replace(
    _WORD_CHARACTERS, r"\w"
)
_COLLECTIVES = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "crossdevicereduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "collectivepermute": "send_recv",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
    "wait": "wait",
}
# In this order, since "allreduce" holds "reduce" and "sendrecv" holds both of its parts.
_EXPERT_PARALLEL = re.compile("^(?:deep_ep|dpsk::ep|mori|uccl)::(?!layout::)")
"""Libraries of expert parallelism: dispatch sends tokens to the experts, combine sends them back."""


@cache
def parse_collective(name: str) -> str | None:
    """Return the collective that a communication's name refers to: all_reduce, all_gather, ...; None for other names.

    Args:
        name: A call (``c10d::allreduce_``), a backend's range (``nccl:send 0->1``), a kernel
            (``ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)``) or a recorded name (``_allgather_base``). Other names
            (``aten::gather``) give None. NCCL runs sends, receives and all-to-alls in one kernel: send_recv.
    """
    if not re.search(_COMMUNICATION, name):
        return None
    plain = re.sub(rf"^void\s+|{ANONYMOUS_NAMESPACE}", "", name)
    identifier = re.split(r"[(<\s]", plain, maxsplit=1)[0].rpartition(":")[2]
    if re.search(r"_copy_(?:in|out)$", identifier):  # of a local buffer
        return None
    letters = re.sub("[_-]", "", identifier.lower())
    if _EXPERT_PARALLEL.search(plain) and "notify" not in letters:
        letters = re.sub("dispatch|combine", "alltoall", letters)
    return next((collective for word, collective in _COLLECTIVES.items() if word in letters), None)


def parse_collectives(names: pl.Series) -> pl.Series:
    """Return `parse_collective` of each name, computed once per distinct name; Categorical."""
    names = names.cast(pl.Categorical)
    rows, positions = text_codes.find_distinct(text_codes.read_codes(names))
    distinct = take_rows(names, rows).cast(pl.String)
    collectives = [*map(parse_collective, distinct), None]  # the position of null is -1
    by_position = pl.Series(names.name, collectives, dtype=pl.String).cast(pl.Categorical)
    return take_rows(by_position, np.where(positions < 0, rows.size, positions))


def parse_argument_names(op_schema: str) -> list[str]:
    """Return the argument names in an operator schema: tensors and dst for ``c10d::send(Tensor[] tensors, int dst) ->
    Work``.
    """
    inside = op_schema.partition("(")[2].partition(") ->")[0]
    return [re.split(r"[\s=]", part.partition("=")[0].strip())[-1] for part in inside.split(",")]


def get_tensor_directions(operator: str, argument: str) -> tuple[bool, bool]:
    """Infer from the names of a c10d operator and a tensor argument whether it sends the tensor, and receives into it.

    Arguments called output_tensors, input_tensor, ... have one direction; others (tensors) are used in place.
    """
    if argument.startswith(("input", "output")):
        return argument.startswith("input"), argument.startswith("output")
    return not re.search(r"::recv_?", operator), not operator.endswith("::send")


_DTYPES_BY_SIZE = {
    1: "bool char byte uint8 int8 u8 i8 unsigned_char signed_char qint8 quint8 fp8 float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float8e4m3 float8e5m2 float4_e2m1fn_x2",
    2: "half float16 fp16 f16 bfloat16 bf16 short short_int int16 uint16 i16 u16 unsigned_short "
    "unsigned_short_int",
    4: "float float32 fp32 f32 int int32 uint32 i32 u32 unsigned_int qint32 "
    "complexhalf complex32 complex<half>",
    8: "double float64 fp64 f64 long long_int int64 uint64 i64 u64 long_long unsigned_long "
    "unsigned_long_int complexfloat complex64 complex<float>",
    16: "complexdouble complex128 complex<double>",
}
_ITEMSIZE_BY_DTYPE = {
    spelling: size for size, spellings in _DTYPES_BY_SIZE.items() for spelling in spellings.split()
}


def itemsize(dtype: str | None) -> int | None:
    """Return the size in bytes of an element type (float, c10::BFloat16, long int, ...); None if unknown."""
    if dtype is None:
        return None
    plain = re.sub(r"c10::|torch\.|std::|^nccl|_t$", "", dtype.strip()).lower()
    return _ITEMSIZE_BY_DTYPE.get(plain.replace(" ", "_"))
