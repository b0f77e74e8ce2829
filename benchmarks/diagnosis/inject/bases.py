"""The clean runs into which problems are injected: real recordings, re-timed without the problems that they have.

A recording becomes a base in three steps. Its own problems are removed: lags of its dependency graph shrink, as if its
host were faster or its products narrower. A recording of one rank of several is repeated for each rank. A seed varies
the time of every kernel and host segment a little, so that no two clean runs and no two ranks are equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import polars as pl

import etloom
from etloom.core.trace import Job, Trace
from etloom.graphs import DependencyGraph, build_graph
from etloom.graphs.graph import EdgeKind, Int64Array
from etloom.linker import link
from etloom.timeline.activity import find_steps, find_window

DATA = Path(os.environ.get("ETLOOM_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
LINKED_TABLES = ("launches", "links", "thread_dependencies", "sync_dependencies", "stats", "nodes")
"""Tables that linking fills, or that describe operators which an injection does not repeat."""
KERNEL_NOISE, HOST_NOISE = 0.02, 0.1
"""Standard deviation of the logarithm of a lag."""
INTERRUPTED_RATIO, INTERRUPTED_NS = 3, 300_000
"""An operator that takes this many times its usual duration, and this much longer, was interrupted."""


@dataclass(frozen=True, eq=False)
class Base:
    """A clean run.

    Attributes:
        name: As in `BASES`.
        job: The linked job.
        dependencies: Its graph.
        noise: Per edge, factor on its lag.
    """

    name: str
    job: Job
    dependencies: DependencyGraph

    @cached_property
    def has_device(self) -> bool:
        return any(trace.launches.height for trace in self.job.values())

    @cached_property
    def target(self) -> np.ndarray:
        return self.dependencies.graph.target

    @cached_property
    def edge_ranks(self) -> np.ndarray:
        return self.dependencies.graph.edge_ranks

    @cached_property
    def counts(self) -> np.ndarray:
        """Mask of the points up to the end of the last activity or step, as findings count them."""
        ends = [window[1] for trace in self.job.values() if (window := find_window(trace))]
        return self.dependencies.graph.time <= max(ends)

    @cached_property
    def begin_ns(self) -> int:
        return min(int(find_steps(trace)["start"][0]) for trace in self.job.values())

    @cached_property
    def step_count(self) -> int:
        return min(find_steps(trace).height for trace in self.job.values())

    def draw_lags(self, seed: int) -> Int64Array:
        """Return the lags with the noise of this seed, ns."""
        graph, random = self.dependencies.graph, np.random.default_rng([seed, 7])
        sigma = np.select(
            [graph.kind == EdgeKind.KERNEL, np.isin(graph.kind, (EdgeKind.SEGMENT, EdgeKind.IDLE))],
            [KERNEL_NOISE, HOST_NOISE],
            0.0,
        )
        factor = np.exp(random.normal(size=len(sigma)) * sigma)
        return np.round(graph.lag * factor).astype(np.int64)


def relink(trace: Trace, rank: int) -> Trace:
    """Return a trace linked again, after events were added or moved."""
    empty = {name: trace.table(name).clear() for name in LINKED_TABLES}
    return link(trace.replace(None, **empty).replace(meta={"rank": rank, "linked": False, "files": []}))


def _remove_interruptions(job: Job, balance: bool = False) -> Job:
    """Return the job without the delays of operators that the host's scheduler interrupted.

    Args:
        balance: Scale the operators of each rank to the same sum.
    """
    from etloom.graphs import algorithms
    from etloom.simulator.retiming import retime_job

    graph = build_graph(job).graph
    lag, ranks = graph.lag.copy(), graph.edge_ranks
    sums: dict[int, tuple[np.ndarray, int]] = {}
    for rank, trace in job.items():
        edges = np.flatnonzero((ranks == rank) & (graph.kind == EdgeKind.SEGMENT) & (graph.owner >= 0))
        names = trace.events["name"].to_physical().to_numpy()[graph.owner[edges]]
        usual = (
            pl.DataFrame({"name": names, "lag": lag[edges]})
            .select(pl.col("lag").median().over("name").cast(pl.Int64))
            .to_series()
            .to_numpy()
        )
        late = (lag[edges] > INTERRUPTED_RATIO * usual) & (lag[edges] - usual > INTERRUPTED_NS)
        lag[edges[late]] = usual[late]
        sums[rank] = (edges, int(lag[edges].sum()))
        idle = np.flatnonzero((ranks == rank) & (graph.kind == EdgeKind.IDLE))
        lag[idle] = np.minimum(lag[idle], INTERRUPTED_NS)
    least = min(total for _, total in sums.values())
    for edges, total in sums.values() if balance else ():
        lag[edges] = np.round(lag[edges] * (least / total)).astype(np.int64)
    return retime_job(job, graph, algorithms.compute_times(graph, lag))


def _rename_kernels(job: Job, names: dict[str, str]) -> Job:
    """Return the job with parts of kernel names (regular expressions) replaced."""

    def rename(trace: Trace) -> Trace:
        name = pl.col("name").cast(pl.String)
        for pattern, text in names.items():
            name = pl.when(pl.col("cat") == "kernel").then(name.str.replace(pattern, text)).otherwise(name)
        return trace.replace(None, events=trace.events.with_columns(name.cast(pl.Categorical).alias("name")))

    return Job({rank: rename(trace) for rank, trace in job.items()}, job.meta)


def _open(
    path: str, changes: Sequence[str] = (), rename: dict[str, str] | None = None, ranks: int = 0
) -> Job:
    job = etloom.open(DATA / path)
    if changes:
        job = etloom.simulate(job, *changes).job
    if rename:
        job = _rename_kernels(job, rename)
    if ranks:
        job = Job({rank: job[next(iter(job))] for rank in range(ranks)})
    return _relink(job)


def _relink(job: Job) -> Job:
    return Job({rank: relink(trace, rank) for rank, trace in job.items()})


TENSOR_CORES = {"volta_sgemm": "volta_fp16_s884gemm", "sgemm": "tf32_s1688gemm"}
_OPENERS: dict[str, Callable[[], Job]] = {
    # ResNet-50 under DistributedDataParallel on A100s, with a faster host and channels_last, and hardly any broadcasts
    # of buffers.
    "ddp": lambda: _open(
        "nccl_ddp",
        (
            "host x0.1",
            "kernel:*nchw* x0.05",
            "kernel:*nhwc*Kernel* x0.05",
            "kernel:*elementwise* x0.5",
            "comm x0.5",
            "op:c10d::broadcast_ x0.02",
            "op:aten::flatten_dense_tensors x0.02",
            "op:aten::unflatten_dense_tensors x0.02",
        ),
        TENSOR_CORES,
        ranks=2,
    ),
    # ResNet-50 on a V100, with half precision.
    "resnet": lambda: _open(
        "hta_misc/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
        ("host x0.5", "kernel:*sgemm* x0.4", "kernel:*elementwise* x0.5"),
        TENSOR_CORES,
    ),
    # A recommendation model on 4 of 8 V100s, with a faster host.
    "dlrm": lambda: _open("dlrm", ("host x0.1", "comm x0.2"), TENSOR_CORES),
    # A transformer under DistributedDataParallel on CPUs, without interruptions.
    "cpu": lambda: _relink(
        etloom.simulate(_remove_interruptions(_open("cpu/ddp_2", ranks=2)), "comm x0.05").job
    ),
    # A pipeline of 4 stages on CPUs, without interruptions, and of equal stages.
    "pipeline": lambda: _relink(_remove_interruptions(_open("cpu/pp_4", ("comm x0.1",)), balance=True)),
}
BASES = tuple(_OPENERS)


@cache
def open_base(name: str) -> Base:
    job = _OPENERS[name]()
    return Base(name, job, build_graph(job))
