"""Derives the rank of a process from its environment, and the tracks of its devices from its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
"""Set for each rank by torchrun, Open MPI, Slurm and MPICH, the most reliable first."""


def find_rank(environment: Mapping[str, Any]) -> int | None:
    """Return the rank that the launcher of a job stated in the environment of a process, or None."""
    for variable in _RANK_VARIABLES:
        text = str(environment.get(variable, ""))
        if text.isdecimal() and len(text) < 10:
            return int(text)
    return None


def build_device_tracks(events: pl.DataFrame) -> pl.DataFrame:
    """Build rows of the threads table for the devices and streams of one trace's events."""
    work = events.filter(pl.col("device").is_not_null())
    devices = work.select("pid", device="device").unique().sort("pid")
    streams = work.filter(pl.col("stream").is_not_null()).select("pid", "tid").unique().sort("pid", "tid")
    return pl.concat(
        [
            devices.select(
                "pid",
                tid=pl.lit(None, dtype=pl.Int64),
                name=pl.format("GPU {}", "device"),
                labels=pl.format("GPU {}", "device"),
            ),
            streams.select(
                "pid", "tid", name=pl.format("stream {}", "tid"), labels=pl.lit(None, dtype=pl.String)
            ),
        ]
    )
