"""Reads measured times of kernels and collectives on several devices: the tables of aiconfigurator-core (Apache-2.0).

Only its Parquet files are read; none of its code runs. The nearest measured shapes give the ratio of the times on two
devices, or of the time on one device to its limit (FLOPs by peak, bytes by bandwidth): both change slowly with the
shape, unlike the times themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom.analyses.flops.peaks import Peaks, lookup_peaks

Array = NDArray[np.float64]

SYSTEMS = {
    "A100 80GB SXM": "a100_sxm",
    "A100 80GB PCIe": "a100_pcie",
    "H100 SXM": "h100_sxm",
    "H100 PCIe": "h100_pcie",
    "H200 SXM": "h200_sxm",
    "B200": "b200_sxm",
}
"""Name of a device in devices.json -> folder of its tables."""

MAX_DISTANCE = 2.0
"""The largest distance of a shape from measured ones, in factors of two over all sizes together."""
_NEIGHBORS = 4
_FIXED_NS = 3_000.0
"""Added to the limits of calls, since small ones take about this time whatever they do."""
TIME_ERRORS_PCT = {"gemm": 17, "context_attention": 37, "generation_attention": 31}
"""Family -> error below which 90 % of the measured times are predicted from the other shapes of their device: the
largest over A100, H100, H200, B200 and the precisions (benchmarks/predict/devices.py --times)."""
_DTYPES = {"fp16": "bfloat16", "bf16": "bfloat16", "fp8": "fp8"}


@dataclass(frozen=True)
class Family:
    """A family of measurements (such as gemm): file name, column of the precision or operation, and columns of the
    sizes."""

    file: str
    kind: str
    sizes: tuple[tuple[str, pl.Expr], ...]


def _column(name: str) -> tuple[str, pl.Expr]:
    return name, pl.col(name)


_CONTEXT = ("context", pl.col("isl") + pl.col("step"))
_HEADS = (_column("num_heads"), _column("num_key_value_heads"), _column("head_dim"))
FAMILIES: Mapping[str, Family] = {
    "gemm": Family("gemm_perf", "gemm_dtype", (_column("m"), _column("n"), _column("k"))),
    "context_attention": Family(
        "context_attention_perf", "attn_dtype", (_column("batch_size"), _column("isl"), _CONTEXT, *_HEADS)
    ),
    "generation_attention": Family(
        "generation_attention_perf", "attn_dtype", (_column("batch_size"), _CONTEXT, *_HEADS)
    ),
    "moe": Family(
        "moe_perf",
        "moe_dtype",
        (
            *(_column(name) for name in ("num_tokens", "hidden_size", "topk", "num_experts", "moe_ep_size")),
            ("inter_size", pl.col("inter_size") / pl.col("moe_tp_size")),
        ),
    ),
    "collective": Family("nccl_perf", "op_name", (_column("num_gpus"), _column("message_size"))),
}
"""Family -> its table. moe: sizes of one rank; collective: kind is all_reduce, all_gather, reduce_scatter, alltoall."""


def find_tables() -> Path | None:
    """Return the folder of the tables of the installed package aiconfigurator-core; None if it is not installed."""
    package = find_spec("aiconfigurator_core")
    if package is None or not package.submodule_search_locations:
        return None
    folder = Path(package.submodule_search_locations[0]) / "systems" / "data"
    return folder if folder.is_dir() else None


def read_family(folder: Path, system: str, name: str) -> pl.DataFrame:
    """Return all rows measured on a device for the table ``name`` (gemm_perf, ...), as in its files; latency in ms.

    The newest version of each framework; rows with the same key are averaged.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{system}/*/*/*/{name}.parquet"), key=_version_key):
        files[path.parents[1].name] = path
    tables = [
        pl.read_parquet(path).drop("version", "device", "kernel_source", "power_limit", "power", strict=False)
        for path in files.values()
    ]
    if not tables:
        return pl.DataFrame()
    table = pl.concat(tables, how="diagonal_relaxed")
    return table.group_by([column for column in table.columns if column != "latency"]).agg(
        pl.col("latency").mean()
    )


def _version_key(path: Path) -> tuple[int, ...]:
    digits = "".join(character if character.isdigit() else " " for character in path.parent.name)
    return tuple(int(part) for part in digits.split())


@dataclass(frozen=True, eq=False)
class MeasuredRatios:
    """Measured times of calls, divided by the times on another device or by their limits, by kind and size of call.

    Attributes:
        shapes: kind -> log2 of the sizes of the measured calls.
        ratios: kind -> the ratio of each of these calls.
    """

    shapes: dict[str, Array]
    ratios: dict[str, Array]

    @classmethod
    def load(cls, family: str, old: str, new: str, folder: Path | None = None) -> MeasuredRatios | None:
        """Return the time ratios (new / old) of two devices named as in devices.json; None if not measured on both."""
        folder = folder or find_tables()
        if folder is None or old not in SYSTEMS or new not in SYSTEMS or old == new:
            return None
        return _load_ratios(family, folder, SYSTEMS[old], SYSTEMS[new])

    @classmethod
    def load_times(cls, family: str, peaks: Peaks, folder: Path | None = None) -> MeasuredRatios | None:
        """Return the measured times of a device relative to `count_limits`; None if the family was not measured."""
        folder = folder or find_tables()
        if folder is None or peaks.name not in SYSTEMS or family not in TIME_ERRORS_PCT:
            return None
        return _load_times(family, folder, peaks.name)

    @classmethod
    def learn(
        cls, family: str, shapes: Array, kinds: Sequence[str | None], times: Array, peaks: Peaks
    ) -> MeasuredRatios | None:
        """Return the times (ns) of recorded calls relative to `count_limits`; None if there are none of the family.

        Args:
            family: one of `TIME_ERRORS_PCT`.
            shapes: the sizes of the family in columns; nan for other calls.
            kinds: precision of each.
            times: ns.
            peaks: of the device that ran them.
        """
        sizes, ratios = {}, {}
        for kind in {_DTYPES[name] for name in kinds if name in _DTYPES}:
            rows = np.array([_DTYPES.get(name or "") == kind for name in kinds]) & np.isfinite(shapes).all(
                axis=1
            )
            if not rows.any():
                continue
            distinct, inverse = np.unique(shapes[rows], axis=0, return_inverse=True)
            values = times[rows] / count_limits(family, shapes[rows], kind, peaks)
            sizes[kind] = np.log2(distinct)
            ratios[kind] = np.array([np.median(values[inverse.ravel() == i]) for i in range(len(distinct))])
        return cls(sizes, ratios) if sizes else None

    def compute_ratios(self, shapes: Array, kinds: Sequence[str | None]) -> Array:
        """Return the ratio of each call, from the measured ones with the nearest sizes.

        The ratio is nan if no measured call has about the same sizes.

        Args:
            shapes: the sizes of the family in columns; nan for other calls.
            kinds: precision (fp16, bf16, fp8, ...) or operation of each.
        """
        ratios = np.full(len(shapes), np.nan)
        for kind in {name for name in kinds if name is not None}:
            measured = _DTYPES.get(kind, kind)
            rows = np.flatnonzero([name == kind for name in kinds])
            rows = rows[(np.isfinite(shapes[rows]) & (shapes[rows] > 0)).all(axis=1)]
            if len(rows) and measured in self.shapes:
                distinct, inverse = np.unique(np.log2(shapes[rows]), axis=0, return_inverse=True)
                values = [self._interpolate(measured, shape) for shape in distinct]
                ratios[rows] = np.array(values)[inverse.ravel()]
        return ratios

    def cross_validate(self, kind: str, row: int) -> float:
        """Return the ratio of a measured call, predicted from the others; nan if none has about the same sizes."""
        others = np.arange(len(self.ratios[kind])) != row
        rest = MeasuredRatios({kind: self.shapes[kind][others]}, {kind: self.ratios[kind][others]})
        return rest._interpolate(kind, self.shapes[kind][row])

    def _interpolate(self, kind: str, shape: Array) -> float:
        distance = np.abs(self.shapes[kind] - shape).sum(axis=1)
        nearest = np.argpartition(distance, min(_NEIGHBORS, len(distance) - 1))[:_NEIGHBORS]
        if distance[nearest].min() > MAX_DISTANCE:
            return float("nan")
        weights = 1 / (distance[nearest] + 0.01)
        return float(np.exp(np.average(np.log(self.ratios[kind][nearest]), weights=weights)))


def count_limits(family: str, sizes: Array, kind: str, peaks: Peaks) -> Array:
    """Return the least time of calls of a family and precision on a device, ns; nan without a peak.

    Args:
        family: one of `TIME_ERRORS_PCT`.
        sizes: the sizes of the family (`FAMILIES`) in columns.
        kind: precision, as in the tables.
        peaks: the peaks of the device.
    """
    rate = peaks.tflops("fp8" if kind == "fp8" else "bf16")
    if rate is None or peaks.bandwidth_gbs is None:
        return np.full(len(sizes), np.nan)
    width = 1 if kind == "fp8" else 2
    if family == "gemm":
        m, n, k = sizes.T
        flops, moved = 2 * m * n * k, width * k * (m + n) + 2 * m * n
    else:
        batch, *queries, context, heads, shared, head = sizes.T
        length = queries[0] if queries else np.ones(len(sizes))
        flops = 4 * batch * heads * head * (length * context - (length**2 - length) / 2)
        moved = width * batch * head * 2 * (heads * length + shared * context)
    limits: Array = np.maximum(flops / rate / 1e3, moved / peaks.bandwidth_gbs) + _FIXED_NS
    return limits


@lru_cache(maxsize=16)
def _load_times(family: str, folder: Path, device: str) -> MeasuredRatios | None:
    peaks, described = lookup_peaks(device), FAMILIES[family]
    table = read_family(folder, SYSTEMS[device], described.file)
    if not table.height:
        return None
    rows = _average_rows(table.filter(pl.col("latency") > 0), described, pl.col("latency") * 1e6)
    measured = _split_kinds(rows, described)
    ratios = {
        kind: times / count_limits(family, 2.0**shapes, kind, peaks)
        for kind, (shapes, times) in measured.items()
        if kind in _DTYPES.values()
    }
    return MeasuredRatios({kind: measured[kind][0] for kind in ratios}, ratios) if ratios else None


def _average_rows(table: pl.DataFrame, family: Family, value: pl.Expr) -> pl.DataFrame:
    """Return the geometric mean of a value for each kind and combination of sizes."""
    sizes = [size.cast(pl.Float64).alias(f"size_{name}") for name, size in family.sizes]
    return table.group_by(pl.col(family.kind).alias("kind"), *sizes).agg(value=value.log().mean().exp())


def _split_kinds(rows: pl.DataFrame, family: Family) -> dict[str, tuple[Array, Array]]:
    """Return kind -> log2 of the sizes, and the values, of the rows of `_average_rows` with positive sizes."""
    names = [f"size_{name}" for name, _ in family.sizes]
    rows = rows.filter(pl.min_horizontal(names) > 0).sort("kind", *names)
    return {
        str(kind): (np.log2(part.select(names).to_numpy()), part["value"].to_numpy())
        for (kind,), part in rows.partition_by("kind", as_dict=True).items()
    }


@lru_cache(maxsize=16)
def _load_ratios(family: str, folder: Path, old: str, new: str) -> MeasuredRatios | None:
    described = FAMILIES[family]
    tables = [read_family(folder, system, described.file) for system in (old, new)]
    if not all(table.height for table in tables):
        return None
    shared = set(tables[0].columns) & set(tables[1].columns) - {"latency"}
    both = tables[0].join(tables[1], on=sorted(shared), suffix="_new", nulls_equal=True)
    both = both.filter(pl.col("latency") > 0, pl.col("latency_new") > 0)
    rows = _average_rows(both, described, pl.col("latency_new") / pl.col("latency"))
    measured = _split_kinds(rows, described)
    shapes = {kind: sizes for kind, (sizes, _) in measured.items()}
    ratios = {kind: values for kind, (_, values) in measured.items()}
    return MeasuredRatios(shapes, ratios) if shapes else None
