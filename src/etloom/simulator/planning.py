"""Ranks the layouts of a training job on a cluster: step time, memory, and what limits each.

All layouts are laid out as arrays: first their memory, then the times of those that fit. Of the layouts with the same
mesh (tp, cp, pp, dp, ep), the fastest is a row of the answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.core.errors import AnalysisError, EtloomError, InvalidValue, UnknownName
from etloom.core.text import count_noun
from etloom.simulator.durations import Z_90
from etloom.simulator.interval_classes import combine_errors, explain_interval
from etloom.simulator.network.model import NetworkModel
from etloom.simulator.training_jobs import (
    OPTIMIZER_BYTES,
    RECOMPUTATIONS,
    SHARDINGS,
    Cluster,
    JobValue,
    TrainingJob,
    tabulate_values,
)
from etloom.simulator.training_shapes import (
    Array,
    Layout,
    estimate_memory,
    take_rows,
)
from etloom.simulator.training_step import StepConstants, StepTimes, predict_steps

Mask = NDArray[np.bool_]
AXES = {
    "tp": "tensor", "cp": "context", "pp": "pipeline", "vp": "chunks", "dp": "data", "ep": "expert",
    "mb": "micro_batches",
}  # fmt: skip
"""Axis, as in etloom predict --parallel -> attribute of `Layout`."""
_CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_CONTEXTS = (1, 2, 4, 8, 16, 32)
_MIN_CONTEXT = 2048
"""Fewest tokens of a sequence that context parallelism leaves on a GPU."""
_MAX_WASTE = 1.15
"""Largest ratio of a stage's layers to the mean, where the layers do not divide evenly."""
_MAX_LAYOUTS = 1_000_000
USABLE_MEMORY = 0.95
"""Share of a GPU's memory that a job can use: the allocator's fragments need the rest."""

_LIMITS = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "tensor": "tp communication",
    "context": "cp communication",
    "expert": "ep communication",
    "data": "dp communication",
    "message": "pp communication",
    "bubble": "bubble",
    "host": "host",
}
"""Part of the step time -> its name in the answer."""
_HOST_TIMES = ("operator_s", "reduce_operator_s", "step_s")
_COMMUNICATIONS = ("tensor", "context", "expert", "data", "message")


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The result of `plan`: the layouts of a job on a cluster that fit, from the fastest.

    Attributes:
        layouts: one per mesh, from the fastest; ``times`` and ``memory`` likewise.
        times: the parts of the step times.
        memory: bytes of the GPU that needs most, by kind.
        considered: number of layouts whose memory was estimated.
        misfits: sentence on those that need more memory than a GPU has; empty if all fit.
        values: what a recording shows of the job, and values that were set.
    """

    job: TrainingJob
    cluster: Cluster
    layouts: Layout
    times: StepTimes
    memory: Mapping[str, Array]
    considered: int
    misfits: str
    values: tuple[JobValue, ...] = ()

    @cached_property
    def table(self) -> pl.DataFrame:
        """One row per layout, from the fastest.

        Columns: tp, cp, pp, vp (model chunks per stage), dp, ep; sharding (ZeRO stage; zero3 is FSDP), micro_batch,
        micro_batches, recompute; step_ns with the 90 % interval lower_bound_ns and upper_bound_ns, interval (whether
        measurements calibrate it); tokens_per_s, mfu_pct; limit (the two largest parts of the step); bubble_pct,
        exposed_pct (communication); memory_bytes and its kinds, memory_limit (the share of the usable memory, and the
        largest kind); cost_per_million_tokens if the cluster has a price.
        """
        layouts, seconds = self.layouts, self.times.total
        mesh = {
            "tp": layouts.tensor, "cp": layouts.context, "pp": layouts.pipeline, "vp": layouts.chunks,
            "dp": layouts.data, "ep": layouts.expert,
        }  # fmt: skip
        tokens = self.job.batch * self.job.model.sequence
        deviation, is_calibrated = bound_errors(self.job, self.cluster, layouts)
        rate = tokens / seconds
        peak = self.cluster.gpus * _find_peak(self.cluster)
        exposed = sum(getattr(self.times, name) for name in _COMMUNICATIONS)
        price = self.cluster.price
        cost = (
            {}
            if price is None
            else {"cost_per_million_tokens": price * self.cluster.gpus / 3600 / rate * 1e6}
        )
        return pl.DataFrame(
            {
                **{name: _round(values) for name, values in mesh.items()},
                "sharding": [SHARDINGS[int(stage)] for stage in np.asarray(layouts.sharding)],
                "micro_batch": _round(layouts.micro_batch),
                "micro_batches": _round(layouts.micro_batches),
                "recompute": [RECOMPUTATIONS[int(mode)] for mode in np.asarray(layouts.recompute)],
                "step_ns": _round(seconds * 1e9),
                "lower_bound_ns": _round(seconds * 1e9 / deviation),
                "upper_bound_ns": _round(seconds * 1e9 * deviation),
                "interval": np.where(is_calibrated, "calibrated", "not calibrated"),
                "tokens_per_s": rate,
                "mfu_pct": 100 * rate * self.job.model.count_token_flops() / peak,
                "limit": self._name_limits(),
                "bubble_pct": 100 * self.times.bubble / seconds,
                "exposed_pct": 100 * exposed / seconds,
                "memory_bytes": _round(sum(self.memory.values())),
                "memory_limit": self._name_largest_memory(),
                **{f"{kind}_bytes": _round(values) for kind, values in self.memory.items()},
                **cost,
            }
        )

    @cached_property
    def inferred(self) -> pl.DataFrame:
        """One row per value of a recorded job, see `tabulate_values`; empty for a job from YAML."""
        return tabulate_values(self.values)

    @property
    def description(self) -> list[str]:
        """Sentences on the job and the cluster; of a recording, how each value of the job is known."""
        job, cluster = self.job, self.cluster
        levels = ", ".join(
            f"{100 * level.efficiency:.0f} % of {level.name} {level.bytes_per_second / 1e9:g} GB/s"
            for level in cluster.topology.levels
        )
        lines = []
        for basis, part in self.inferred.group_by("basis", maintain_order=True):
            pairs = [f"{key} {value}" for key, value in part.select("key", "value").iter_rows()]
            lines += [f"{basis[0]}: {', '.join(pairs[i : i + 9])}" for i in range(0, len(pairs), 9)]
        if lines:
            lines.append(
                "--set KEY=VALUE replaces a value, such as --set batch=512; --describe shows sources"
            )
        return [
            *lines,
            f"{job.name}: {job.model.count_parameters() / 1e9:,.2f} billion parameters, "
            f"{job.model.count_token_flops() / 1e9:,.1f} GFLOP per token; "
            f"{job.batch:,} sequences of {job.model.sequence:,.0f} tokens per step",
            f"{cluster.name}: {cluster.gpus:,} {cluster.peaks.name} in nodes of {cluster.node_size}; per GPU {levels}",
        ]

    @property
    def _first_classes(self) -> dict[str, Mask]:
        return list_classes(self.job, self.cluster, take_rows(self.layouts, np.arange(1)))

    def _name_limits(self) -> list[str]:
        """Return the two largest parts of each step time, with their shares."""
        names = list(_LIMITS)
        shares = np.stack([getattr(self.times, name) for name in names]) / self.times.total
        order = np.argsort(-shares, axis=0, kind="stable")[:2]
        return [
            ", ".join(f"{_LIMITS[names[part]]} {100 * shares[part, row]:.0f} %" for part in order[:, row])
            for row in range(shares.shape[1])
        ]

    def _name_largest_memory(self) -> list[str]:
        """Return the share of the usable memory that each layout needs, and the kind that needs most."""
        kinds, sizes = list(self.memory), np.stack(list(self.memory.values()))
        need, usable = sizes.sum(axis=0), USABLE_MEMORY * self.cluster.memory_bytes
        return [
            f"{100 * need[row] / usable:.0f} % used, {kinds[largest]} {100 * sizes[largest, row] / need[row]:.0f} %"
            for row, largest in enumerate(sizes.argmax(axis=0))
        ]

    @cached_property
    def reasons(self) -> list[str]:
        """Sentences on the job, the cluster, the search, and the assumptions behind the times and intervals."""
        job, cluster = self.job, self.cluster
        kinds = sorted(((values[0], kind) for kind, values in self.memory.items()), reverse=True)
        need, usable = sum(size for size, _ in kinds), USABLE_MEMORY * cluster.memory_bytes
        overlap = choose_constants(job, cluster).overlap
        return [
            *self.description,
            f"{count_noun(self.times.total.size, 'mesh', 'meshes')}, each the fastest of its layouts that fit; "
            f"{count_noun(self.considered, 'layout')} in all",
            *([self.misfits] if self.misfits else []),
            f"memory: the first layout needs {need / 1e9:.1f} of {usable / 1e9:.1f} GB "
            f"({100 * USABLE_MEMORY:.0f} % of {cluster.memory_bytes / 1e9:.1f}): "
            + ", ".join(f"{kind} {size / 1e9:.1f}" for size, kind in kinds if size >= 0.05e9),
            f"first {explain_interval(name for name, holds in self._first_classes.items() if holds[0])}",
            "assumed: ranks in the order tp, cp, dp, pp; tp, cp and ep communication exposed; "
            f"{100 * overlap:.0f} % of computation hides dp and pp",
            "not modelled: uneven experts, slower GPUs, failures, input delays",
        ]


def plan(
    job: TrainingJob,
    cluster: Cluster,
    parallel: Mapping[str, int] | None = None,
    values: tuple[JobValue, ...] = (),
) -> Plan:
    """Rank the layouts of a job on a cluster.

    Args:
        job: the job.
        cluster: the cluster.
        parallel: sizes of axes that are fixed, by the names of `AXES`.
        values: what a recording shows of the job.

    Raises:
        EtloomError: the device lacks the precision, no layout exists, or none fits into the memory.
    """
    _check_parallel(parallel or {}, job, cluster)
    constants = choose_constants(job, cluster)
    layouts = _list_layouts(job, cluster, parallel or {})
    memory = estimate_memory(
        job.model,
        layouts,
        gradient_bytes=constants.gradient_bytes,
        state_bytes=OPTIMIZER_BYTES[job.optimizer],
        fused=job.fused,
    )
    peak, usable = np.asarray(sum(memory.values())), USABLE_MEMORY * cluster.memory_bytes
    fitting = np.flatnonzero(peak <= usable)
    misfits = _describe_misfits(layouts, memory, cluster)
    if not fitting.size:
        raise AnalysisError(
            misfits, remedy="more GPUs, GPUs with more memory, or an optimizer with smaller states"
        )
    considered, layouts = peak.size, take_rows(layouts, fitting)
    times = predict_steps(job.model, layouts, constants, NetworkModel(cluster.topology))
    mesh = [np.asarray(getattr(layouts, AXES[axis])) for axis in ("tp", "cp", "pp", "dp", "ep")]
    order = np.argsort(times.total, kind="stable")
    _, first = np.unique(np.stack(mesh)[:, order], axis=1, return_index=True)
    rows = order[np.sort(first)]
    return Plan(
        job,
        cluster,
        take_rows(layouts, rows),
        StepTimes(**{field.name: np.asarray(getattr(times, field.name))[rows] for field in fields(times)}),
        {kind: values[fitting][rows] for kind, values in memory.items()},
        considered,
        misfits,
        values,
    )


def _check_parallel(parallel: Mapping[str, int], job: TrainingJob, cluster: Cluster) -> None:
    """Raise InvalidValue if an axis is unknown, its size is not a positive whole number, or sizes contradict others."""
    if not isinstance(parallel, Mapping):
        raise InvalidValue(f"expected sizes by axis, got {parallel!r}", option="parallel")
    for axis, size in parallel.items():
        if axis not in AXES:
            raise UnknownName("axis", str(axis), list(AXES), option="parallel")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidValue(f"{axis}: expected a whole number above 0, got {size!r}", option="parallel")
    ranks = math.prod(parallel.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    samples = parallel.get("dp", 1) * parallel.get("mb", 1)
    heads, experts = int(job.model.heads), int(job.model.experts)
    problems = {
        f"tp x cp x pp x dp = {ranks:,} does not divide {cluster.gpus:,} GPUs": cluster.gpus % ranks,
        f"dp x mb = {samples:,} does not divide a batch of {job.batch:,}": job.batch % samples,
        f"tp does not divide {heads:,} heads": heads % parallel.get("tp", 1),
        f"ep does not divide {experts:,} experts": max(experts, 1) % parallel.get("ep", 1),
        f"pp: the job has {job.model.layers:g} layers": parallel.get("pp", 1) > job.model.layers,
        "vp: model chunks need several stages (pp)": parallel.get("vp", 1) > 1 == parallel.get("pp"),
    }
    for text, is_wrong in problems.items():
        if is_wrong:
            raise InvalidValue(text, option="parallel")


def choose_constants(job: TrainingJob, cluster: Cluster) -> StepConstants:
    """Return the constants of a job's kernels on a cluster's device. Raises EtloomError.

    Those of unfused kernels on an A100 are the ones that were compared with measurements. The others are assumptions
    from public figures: large products of newer devices reach 70 % of the peak (their power limits them) and FP8 85 %
    of that share, fused attention 55 % (FlashAttention 2 on an A100, else 3), and fused kernels halve traffic and
    launches. PyTorch's selective recomputation repeats every second product (torchtitan), and its steps take 1.2 times
    as long as modelled, as torchtitan on A100s shows, and then on H100s and H200s (benchmarks/predict/published.py).
    """
    peaks, speedup = cluster.peaks, 1.0
    if job.precision == "fp8":
        fast = peaks.tflops("fp8")
        if fast is None:
            raise EtloomError(f"precision: the {peaks.name} has no fp8", remedy="expected bf16 or fp16")
        speedup = 0.85 * fast * 1e12 / _find_peak(cluster)
    is_ampere = peaks.name.startswith("A100")
    device: dict[str, Any] = {
        "peak_flops": _find_peak(cluster),
        "bandwidth": (peaks.bandwidth_gbs or 0.0) * 1e9,
        "multiprocessors": float(peaks.multiprocessors or 100),
        "linear_speedup": speedup,
        "tile_efficiency": StepConstants.tile_efficiency if is_ampere else 0.7,
        **{name: cluster.host * getattr(StepConstants, name) for name in _HOST_TIMES},
    }
    if not job.fused:
        return StepConstants(**device)
    is_torch = job.kernels == "torch"
    return StepConstants(
        **device,
        # FlashAttention 2 reaches 35 % of an H100 (Shah et al., "FlashAttention-3", 2024).
        attention_efficiency=0.35 if is_torch and not is_ampere else 0.55,
        product_recompute=0.5 if is_torch else 0.0,
        slowdown=1.2 if is_torch else 1.0,
        activation_passes=20.0,
        sequence_parallel=True,
        operators=80.0,
        exchange_s=0.1e-3 * cluster.host,
        overlap=0.8,
        overlaps_experts=job.overlap_experts,
        reserved_multiprocessors=20.0 * job.overlap_experts,
    )


def _find_peak(cluster: Cluster) -> float:
    """Return the peak FLOP/s of half precision. Raises EtloomError."""
    tflops = cluster.peaks.tflops("bf16") or cluster.peaks.tflops("fp16")
    if tflops is None:
        raise EtloomError(f"device: the {cluster.peaks.name} has no peak of half precision")
    return tflops * 1e12


def _list_layouts(job: TrainingJob, cluster: Cluster, parallel: Mapping[str, int]) -> Layout:
    """Return all layouts of a job on a cluster that agree with fixed sizes. Raises EtloomError."""
    blocks, count = [np.empty((0, 10))], 0
    for mesh in _list_meshes(job, cluster, parallel):
        blocks.append(_vary_mesh(job, *mesh, parallel))
        count += len(blocks[-1])
        if count > _MAX_LAYOUTS or len(blocks) > _MAX_LAYOUTS // 10:
            raise AnalysisError(
                f"more than {_MAX_LAYOUTS:,} layouts", remedy="fix some axes with --parallel, such as pp=8"
            )
    table = np.concatenate(blocks)
    if not len(table):
        sizes = ",".join(f"{axis}={size}" for axis, size in parallel.items())
        raise AnalysisError(
            f"no layout{f' with {sizes}' if sizes else ''} divides {cluster.gpus:,} GPUs, {job.model.heads:g} heads, "
            f"{job.model.layers:g} layers and {job.batch:,} sequences evenly",
            remedy="choose another batch or number of GPUs" + " or fewer fixed axes" * bool(parallel),
        )
    names = (
        "tensor", "context", "pipeline", "data", "expert", "chunks", "micro_batch", "recompute", "sharding",
        "micro_batches",
    )  # fmt: skip
    return Layout(**dict(zip(names, table.T, strict=True)))


def _list_meshes(
    job: TrainingJob, cluster: Cluster, parallel: Mapping[str, int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (tp, cp, pp, dp, ep) for each mesh that divides GPUs, heads, layers, batch and experts."""
    model, node = job.model, cluster.node_size
    experts = int(model.experts)
    for tp in _list_divisors(cluster.gpus):
        if model.heads % tp or tp > max(2 * node, parallel.get("tp", 1)) or (node % tp and tp % node):
            continue
        contexts = {*_CONTEXTS, parallel.get("cp", 1)}
        for cp in sorted(contexts):
            is_short = cp > 1 and (model.sequence % (2 * cp) or model.sequence / cp < _MIN_CONTEXT)
            if cluster.gpus % (tp * cp) or is_short:
                continue
            for pp in _list_divisors(cluster.gpus // (tp * cp)):
                dp = cluster.gpus // (tp * cp * pp)
                if pp > model.layers or job.batch % dp:
                    continue
                stage = cluster.gpus // pp
                for ep in [ep for ep in _list_divisors(experts) if stage % ep == 0] if experts else [1]:
                    sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep}
                    if all(sizes.get(axis, size) == size for axis, size in parallel.items()):
                        yield tp, cp, pp, dp, ep


def _vary_mesh(
    job: TrainingJob, tp: int, cp: int, pp: int, dp: int, ep: int, parallel: Mapping[str, int]
) -> NDArray[np.float64]:
    """Return the layouts of a mesh, one per row: the mesh, chunks, micro-batch, recomputation, sharding, and number of
    micro-batches."""
    model, replica_batch = job.model, job.batch // dp
    chunks = [
        count
        for count in sorted({*_CHUNKS, parallel.get("vp", 1)})
        if (count == 1 or pp > 1)
        and math.ceil(model.layers / (pp * count)) * pp * count <= _MAX_WASTE * model.layers
        and parallel.get("vp", count) == count
    ]
    batches = [
        (size, replica_batch // size)
        for size in _MICRO_BATCHES
        if replica_batch % size == 0 and parallel.get("mb", replica_batch // size) == replica_batch // size
    ]
    shardings = (1, 2, 3) if job.sharding is None else (SHARDINGS.index(job.sharding),)
    if dp * cp == 1 and (ep == 1 or tp * cp * dp == ep):
        shardings = (0,)
    recomputations = range(3) if job.recompute is None else (RECOMPUTATIONS.index(job.recompute),)
    rows = [
        (tp, cp, pp, dp, ep, count, size, recompute, sharding, micro_batches)
        for count, (size, micro_batches), recompute, sharding in product(
            chunks, batches, recomputations, shardings
        )
        if count == 1 or micro_batches % pp == 0
    ]
    return np.array(rows, float).reshape(-1, 10)


def _list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, from the smallest."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _describe_misfits(layouts: Layout, memory: Mapping[str, Array], cluster: Cluster) -> str:
    """Return a sentence on the layouts that need more than the usable memory; empty if there are none."""
    kinds, sizes = list(memory), np.stack(np.broadcast_arrays(*memory.values()))
    peak, usable = sizes.sum(axis=0), USABLE_MEMORY * cluster.memory_bytes
    misfits = np.flatnonzero(peak > usable)
    if not misfits.size:
        return ""
    if misfits.size < peak.size:
        counts = Counter(kinds[largest] for largest in sizes[:, misfits].argmax(axis=0))
        largest_kinds = ", ".join(f"{kind} in {count:,}" for kind, count in counts.most_common(3))
        verb = "needs" if misfits.size == 1 else "need"
        return (
            f"{misfits.size:,} of {count_noun(peak.size, 'layout')} {verb} more than {usable / 1e9:,.1f} GB "
            f"of memory; the largest part is {largest_kinds}"
        )
    nearest = misfits[np.argmin(peak[misfits])]
    axes = {axis: int(np.asarray(getattr(layouts, name))[nearest]) for axis, name in AXES.items()}
    mesh = " ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1)
    sharding, recompute = (
        names[int(np.asarray(values)[nearest])]
        for names, values in ((SHARDINGS, layouts.sharding), (RECOMPUTATIONS, layouts.recompute))
    )
    largest = int(sizes[:, nearest].argmax())
    return (
        f"no layout fits into {usable / 1e9:,.1f} GB; the smallest needs {peak[nearest] / 1e9:,.1f} GB "
        f"({kinds[largest]} {sizes[largest, nearest] / 1e9:,.1f}): {mesh} sharding={sharding} recompute={recompute}"
    )


def list_classes(job: TrainingJob, cluster: Cluster, layouts: Layout) -> dict[str, Mask]:
    """Return for each class of `ERRORS` to which layouts it applies."""
    shape = np.shape(layouts.tensor)
    unfused = job.kernels == "unfused"
    compared = ("A100 80GB SXM",) if unfused else ("A100 80GB SXM", "H100 SXM", "H200 SXM")
    job_wide = {
        f"{job.kernels} kernels": True,
        "another GPU": cluster.peaks.name not in compared,
        "another vendor": cluster.peaks.vendor != "NVIDIA",
        "several nodes": unfused and cluster.gpus > cluster.node_size,
        "experts": bool(job.model.experts),
        "FP8": unfused and job.precision == "fp8",
    }
    return {
        **{text: np.full(shape, holds) for text, holds in job_wide.items()},
        "recomputation not full": np.not_equal(layouts.recompute, 2) & unfused,
        "ZeRO 2 or 3": np.greater(layouts.sharding, 1) & (job.kernels != "torch"),
        "context parallelism": np.greater(layouts.context, 1),
    }


def bound_errors(job: TrainingJob, cluster: Cluster, layouts: Layout) -> tuple[Array, Mask]:
    """Return the factor of the 90 % interval of each layout, and whether measurements calibrate it."""
    deviation, is_calibrated = combine_errors(list_classes(job, cluster, layouts))
    return np.exp(Z_90 * deviation), is_calibrated


def _round(values: Array | float) -> NDArray[np.int64]:
    return np.asarray(np.rint(values), np.int64)
