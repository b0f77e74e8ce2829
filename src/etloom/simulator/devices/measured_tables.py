"""Reads measured times of kernels and collectives on several devices: the tables of aiconfigurator-core (Apache-2.0).

Only its Parquet files are read; none of its code runs. A ratio is that of the nearest measured shapes, since the
ratio of two devices changes slowly with the shape.
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
    """Measured times of calls on a new device, divided by the times on an old device, by kind and size of call.

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

    def compute_ratios(self, shapes: Array, kinds: Sequence[str | None]) -> Array:
        """Return for each call the time on the new device divided by the time on the old device.

        The ratio is nan if no measured call has about the same sizes.

        Args:
            shapes: the sizes of the family in columns; nan for other calls.
            kinds: precision (fp16, bf16, fp8, ...) or operation of each.
        """
        ratios = np.full(len(shapes), np.nan)
        for kind in {name for name in kinds if name is not None}:
            measured = _DTYPES.get(kind, kind)
            rows = np.flatnonzero([name == kind for name in kinds])
            rows = rows[np.isfinite(shapes[rows]).all(axis=1)]
            if len(rows) and measured in self.shapes:
                distinct, inverse = np.unique(np.log2(shapes[rows]), axis=0, return_inverse=True)
                values = [self._interpolate(measured, shape) for shape in distinct]
                ratios[rows] = np.array(values)[inverse.ravel()]
        return ratios

    def _interpolate(self, kind: str, shape: Array) -> float:
        distance = np.abs(self.shapes[kind] - shape).sum(axis=1)
        nearest = np.argpartition(distance, min(_NEIGHBORS, len(distance) - 1))[:_NEIGHBORS]
        if distance[nearest].min() > MAX_DISTANCE:
            return float("nan")
        weights = 1 / (distance[nearest] + 0.01)
        return float(np.exp(np.average(np.log(self.ratios[kind][nearest]), weights=weights)))


@lru_cache(maxsize=16)
def _load_ratios(family: str, folder: Path, old: str, new: str) -> MeasuredRatios | None:
    described = FAMILIES[family]
    tables = [read_family(folder, system, described.file) for system in (old, new)]
    if not all(table.height for table in tables):
        return None
    shared = set(tables[0].columns) & set(tables[1].columns) - {"latency"}
    both = tables[0].join(tables[1], on=sorted(shared), suffix="_new", nulls_equal=True)
    both = both.filter(pl.col("latency") > 0, pl.col("latency_new") > 0)
    sizes = [size.cast(pl.Float64).alias(f"size_{name}") for name, size in described.sizes]
    names = [f"size_{name}" for name, _ in described.sizes]
    both = both.group_by(pl.col(described.kind).alias("kind"), *sizes).agg(
        ratio=(pl.col("latency_new") / pl.col("latency")).log().mean().exp()
    )
    both = both.filter(pl.min_horizontal(names) > 0).sort("kind", *names)
    shapes, ratios = {}, {}
    for (kind,), rows in both.partition_by("kind", as_dict=True).items():
        shapes[str(kind)] = np.log2(rows.select(names).to_numpy())
        ratios[str(kind)] = rows["ratio"].to_numpy()
    return MeasuredRatios(shapes, ratios) if shapes else None
