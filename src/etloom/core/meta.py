"""Types of the entries of ``Trace.meta`` and ``Job.meta``: facts about a trace or run that no table holds."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class LinkMeta(TypedDict, total=False):
    """Results of linking an execution trace and a profile (``meta["link"]``)."""

    how: str | None
    """The key by which operators were paired: rf_id, external_id, op_id, align or file."""
    score: float
    """1 for ids and file; for align, paired operators divided by all operators of the longer sequence."""
    ties: int
    """Iterations of the profile that match equally well."""
    iterations: int | None
    iteration: int | None
    """The linked iteration, counted from 0; None for all."""
    host_operators: int
    linked: int
    coverage: float | None
    """linked / host_operators; None if either file is missing."""
    device_work: int
    launched: int


class TraceMeta(TypedDict, total=False):
    """The entries of ``Trace.meta``; a reader of another format may add its own under ``header``."""

    rank: int | None
    world_size: int | None
    files: list[str]
    formats: list[str]
    clock: Literal["epoch", "relative"] | None
    """The origin of times: the Unix epoch, or an origin that only the file knows."""
    base_ns: int
    """Added to times of the file to get ns since the epoch."""
    host: str | None
    pid: int | None
    schema_version: Any
    kineto_schema_version: Any
    device_properties: list[Any]
    distributed: dict[str, Any] | None
    header: dict[str, Any]
    """Other members of the file's header, as they are."""
    metadata_events: list[Any]
    pg_status: Any
    linked: bool | None
    link: LinkMeta
    step_name: str
    """Regular expression of the events that are the steps, if the caller specified one."""


class JobMeta(TypedDict, total=False):
    """The entries of ``Job.meta``."""

    path: str
    card: dict[str, Any]
    """The workload card found next to the traces."""
    processes: dict[str, str]
    """Name -> trace of a process that is not a rank, such as a tokenizer, next to the traces."""
    run: dict[str, Any]
    """The run.json that `etloom collect` wrote."""
