"""Infers the training job of a recording, real or of a fake world, from the shapes of its operators, for `plan`.

A product of the tokens of a micro-batch with a weight (k, n) occurs forward as (k, n) and backward as (n, k), so that
weights are recognized by the pair of their sizes. Values that the shapes do not show are assumed, and marked as such.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from etloom.analyses.flops.call_shapes import parse_calls, parse_product
from etloom.analyses.flops.counting import count_calls
from etloom.analyses.flops.limits import find_device_peaks
from etloom.core.errors import AnalysisError
from etloom.core.trace import Job, Trace
from etloom.simulator.training_jobs import JobValue

_REMEDY = "describe the job in YAML instead: docs/plan.md"
_OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "FusedAdam": "adamw", "Muon": "muon", "SGD": "sgd"}
"""Class of PyTorch -> its name in a job."""
_PRECISIONS = {"BFloat16": "bf16", "Half": "fp16"}


class RecordedJob(NamedTuple):
    """A job inferred from a recording: ``document`` as from YAML, and ``values`` with the source of each."""

    document: dict[str, Any]
    values: tuple[JobValue, ...]


def describe_recorded_job(job: Job) -> RecordedJob:
    """Return the training job of a recording of all layers of a decoder-only transformer.

    Args:
        job: linked traces with shapes; of a pipeline at least its first rank.

    Raises:
        AnalysisError: the shapes are missing, or are not those of such a model.
    """
    trace = job[min(job)]
    rank_names = _list_names(trace)
    tensor, context, replicas, stages, experts = _find_axes(trace)
    calls = _select_step(count_calls(trace))
    names = calls["name"].cast(pl.String)
    if experts > 1 or names.str.contains("grouped_mm|grouped_gemm").any():
        raise AnalysisError("the experts of a recording are not inferred from its shapes", remedy=_REMEDY)
    batch, queries, _, heads, kv_heads, width = _find_attention(calls)
    embedding = _find_embedding(calls)
    micro_batches = embedding.total()
    vocabulary, hidden = max(embedding)
    pairs = _count_weights(calls, int(batch * queries))
    forward, backward = (
        int(names.str.contains(pattern).sum())
        for pattern in (r"attention(?:_forward)?$|attention_overrideable$", r"attention\w*_backward$")
    )
    depth = min(forward, backward or forward) // micro_batches
    kv_heads, ffn = _find_inner_sizes(pairs, hidden, vocabulary, (heads, kv_heads, width))
    if not (depth and ffn):
        raise AnalysisError("no layers of a transformer found in the recorded shapes", remedy=_REMEDY)
    is_divided = (vocabulary, hidden) in pairs or (hidden, vocabulary) in pairs
    is_torch = names.str.contains("^aten::_scaled_dot_product").any()
    attention_source = "shapes of attention"
    inferred = [
        ("layers", depth * stages, "calls of attention per micro-batch, times stages"),
        ("hidden", hidden, "largest table of embeddings"),
        ("heads", heads * tensor, f"{attention_source}, times tp"),
        ("kv_heads", kv_heads * tensor, f"{attention_source} and of products, times tp"),
        ("head_width", width, attention_source),
        ("ffn", ffn * tensor, "shapes of products, times tp"),
        ("gated", bool(names.str.contains("(?i)silu|swiglu|geglu").any()), "names of activations"),
        ("vocabulary", vocabulary * (tensor if is_divided else 1), "largest table of embeddings"),
        ("sequence", queries * context, f"{attention_source}, times cp"),
        ("batch", int(batch) * micro_batches * replicas, "micro-batch x micro-batches x dp of the recording"),
        ("kernels", "torch" if is_torch else "fused", "operator of attention"),
    ]
    values = [JobValue(key, value, "inferred", source) for key, value, source in inferred]
    values += [_infer_precision(calls), _infer_optimizer(rank_names)]
    values.append(JobValue("tied", False, "assumed", "shapes do not show whether tables are the same"))
    document = {value.key: value.value for value in values}
    axes = {"tp": tensor, "cp": context, "dp": replicas, "pp": stages}
    values += _list_recorded_layout(trace, int(batch), micro_batches, axes)
    return RecordedJob(document, tuple(values))


def _find_inner_sizes(
    pairs: Counter[tuple[int, int]], hidden: int, vocabulary: int, attention: tuple[int, int, int]
) -> tuple[int, int]:
    """Return the number of heads of keys, and the size of the feed-forward layer (0: not found), from weights.

    Args:
        pairs: sizes of weights, and how often they are multiplied.
        hidden: columns of the table of embeddings.
        vocabulary: its rows.
        attention: heads, heads of keys, and width of a head as attention shows them.
    """
    heads, kv_heads, width = attention
    inner = {
        size: count for pair, count in pairs.items() for size in pair if hidden in pair and size != hidden
    }
    # Keys and values may be repeated before attention, so that it shows as many heads as of queries.
    kv_heads = min([kv_heads, *(size // width for size in inner if size < heads * width)]) or kv_heads
    projections = {heads * width, 2 * kv_heads * width, (heads + 2 * kv_heads) * width, vocabulary}
    inner = {size: inner[size] for size in inner if size > heads * width and size not in projections}
    # A product for both the gate and the input of an activation has twice the columns.
    doubled = [size for size in inner if 2 * size in inner]
    return kv_heads, min(doubled or [max(inner, key=lambda size: (inner[size], size), default=0)])


def _list_names(trace: Trace) -> pl.Series:
    """Return the names of events and nodes. Raises AnalysisError if none of them is of a backward pass."""
    names = pl.concat([table["name"].cast(pl.String) for table in (trace.events, trace.nodes)]).unique()
    if not names.str.contains("ackward").any():
        raise AnalysisError("the recording has no backward pass, so it is not of training", remedy=_REMEDY)
    return names


def _list_recorded_layout(
    trace: Trace, micro_batch: int, micro_batches: int, axes: dict[str, int]
) -> list[JobValue]:
    """Return the recorded layout and device, which those of the answer need not be."""
    rows = [
        ("micro-batch", micro_batch, "shapes of attention"),
        ("micro-batches", micro_batches, "lookups of embeddings per step"),
        *(
            (axis, size, "messages between ranks" if axis == "pp" else "process groups")
            for axis, size in axes.items()
        ),
        ("device", _name_device(trace), "the device of the answer is that of --cluster"),
    ]
    return [JobValue(key, value, "recorded", source) for key, value, source in rows]


def _infer_precision(calls: pl.DataFrame) -> JobValue:
    """Return the precision of matrix products."""
    names = calls["name"].cast(pl.String)
    if names.str.contains("_scaled_mm").any():
        return JobValue("precision", "fp8", "inferred", "scaled products")
    products = calls.filter(names.str.contains("mm$|linear$|matmul$"))["dtype"].cast(pl.String).drop_nulls()
    common = products.mode().sort().to_list()[:1]
    for word, precision in _PRECISIONS.items():
        if common and word.lower() in common[0].lower():
            return JobValue("precision", precision, "inferred", "types of products")
    source = f"products are of type {common[0]}" if common else "products state no type"
    return JobValue("precision", "bf16", "assumed", source)


def _infer_optimizer(names: pl.Series) -> JobValue:
    """Return the optimizer from PyTorch's annotations of its steps (Optimizer.step#AdamW.step)."""
    classes = names.str.extract(r"Optimizer\.step#(\w+)\.step").drop_nulls().unique().sort().to_list()
    for name in classes:
        if name in _OPTIMIZERS:
            return JobValue("optimizer", _OPTIMIZERS[name], "inferred", f"annotation of {name}")
    source = (
        f"its memory is not known for {classes[0]}" if classes else "no step of an optimizer is annotated"
    )
    return JobValue("optimizer", "adamw", "assumed", source)


def _name_device(trace: Trace) -> str:
    try:
        return find_device_peaks(trace).name
    except AnalysisError:
        return "unknown"


def _find_axes(trace: Trace) -> tuple[int, int, int, int, int]:
    """Return the sizes of tensor, context, data, pipeline and expert parallelism, from the groups of a rank.

    Messages may use the group of all ranks: the stages are what the other axes leave of them, and without a group of
    replicas, the distance of the nearest peer separates two stages.
    """
    groups = trace.groups.group_by(pl.col("axis").cast(pl.String)).agg(pl.col("size").max())
    sizes = dict(groups.drop_nulls().iter_rows())
    world = max([trace.meta.get("world_size") or 1, *groups["size"].drop_nulls()])
    tensor, context, experts = (sizes.get(axis, 1) for axis in ("tp", "cp", "ep"))
    peers = trace.comms["peer"].drop_nulls().unique().to_list()
    if not peers:
        return tensor, context, max(world // (tensor * context), 1), 1, experts
    distance = min(abs(peer - (trace.rank or 0)) for peer in peers)
    replicas = sizes.get("dp") or max(distance // (tensor * context), 1)
    return tensor, context, replicas, max(world // (tensor * context * replicas), 1), experts


def _select_step(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the calls of the step with the most of them."""
    steps = calls["step"].drop_nulls()
    return calls.filter(pl.col("step") == steps.mode().max()) if len(steps) else calls


def _find_attention(calls: pl.DataFrame) -> tuple[int, ...]:
    """Return the most frequent sizes of attention: batch, queries, context, heads, heads of keys, width of a head."""
    sizes, _ = parse_calls(calls, "context_attention")
    sizes = sizes[np.isfinite(sizes).all(axis=1)]
    if not len(sizes):
        raise AnalysisError("no attention operator with recorded shapes", remedy=_REMEDY)
    rows, counts = np.unique(sizes, axis=0, return_counts=True)
    return tuple(int(value) for value in rows[counts.argmax()])


def _find_embedding(calls: pl.DataFrame) -> Counter[tuple[int, int]]:
    """Return the sizes of the largest table of embeddings, and how often it is used."""
    tables: Counter[tuple[int, int]] = Counter()
    embeddings = calls.filter(pl.col("name").cast(pl.String) == "aten::embedding")
    for dims in embeddings["dims"].cast(pl.String).drop_nulls():
        table, *_ = json.loads(dims) or [[]]
        if isinstance(table, list) and len(table) == 2:
            tables[table[0], table[1]] += 1
    if not tables:
        raise AnalysisError("no embedding with recorded shapes", remedy=_REMEDY)
    largest = max(tables)
    return Counter({largest: tables[largest]})


def _count_weights(calls: pl.DataFrame, tokens: int) -> Counter[tuple[int, int]]:
    """Return how often the tokens of a micro-batch are multiplied with a weight of a pair of sizes."""
    pairs: Counter[tuple[int, int]] = Counter()
    for name, dims in calls.select(pl.col("name", "dims").cast(pl.String)).iter_rows():
        product = parse_product(name, dims)
        if product and int(product[0]) == tokens:
            pairs[tuple(sorted((int(product[1]), int(product[2]))))] += 1  # type: ignore[index]
    return pairs
