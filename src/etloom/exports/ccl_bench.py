"""Write a folder for CCL-Bench: traces in its names, the workload card and the metrics.

    run.ccl-bench/kineto_trace_0.json   rank 0, from `chrome`, if events were recorded
    run.ccl-bench/torch_et_0.json       rank 0, from `execution-trace`, if nodes were recorded
    run.ccl-bench/run.yaml              the workload card of the run, or one with what the traces say
    run.ccl-bench/metrics.json          the rows of the analysis ccl-bench by metric, and those of a prediction

A card that was in the run's folder keeps its values, of keys that etloom does not know too. In a new card, what the
traces do not say is empty: CCL-Bench asks for it.

Format: workload_card_template.yaml and the trace names of CCL-Bench (Cornell).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from etloom.analyses.answers import answer
from etloom.collector.record_validation import is_shallow, validate_rank_facts, validate_run_facts
from etloom.collector.workload_card import build_card, format_yaml
from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.exports import chrome, execution_trace
from etloom.formats.parquet.writer import create_atomically
from etloom.linker.merging import list_device_names

SUFFIX = ".ccl-bench"
NEEDS_PREDICTION = True
"""`etloom.export` passes metrics that the simulator predicts, which an export must not import."""
_METRICS = "metrics.json"
_AXES = {"dp": "dp_replicate", "fsdp": "dp_shard", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep"}
"""Axis of a process group -> kind of parallelism on the card."""


def write(
    trace: Trace | Job, path: str | PathLike[str], predicted: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write a Trace or a Job to a folder for CCL-Bench. An earlier export of the same ranks is replaced.

    Args:
        trace: The run.
        path: The folder.
        predicted: Rows of metrics that need a prediction, by metric; a row has a value or a reason.

    Raises:
        EtloomError: A rank has neither events nor nodes, or something else exists under that name.
    """
    job = trace if isinstance(trace, Job) else Job({trace.rank or 0: trace})
    target = Path(path)
    name = target.name.removesuffix(SUFFIX) or "run"
    files = [_list_trace_files(rank, rank_trace) for rank, rank_trace in job.items()]
    if not all(files):
        raise EtloomError("a rank has neither timed events nor operators", where=path)
    names = {file for rank_files in files for file in rank_files}
    with create_atomically(target, files={*names, f"{name}.yaml", _METRICS}) as folder:
        for (_, rank_trace), rank_files in zip(job.items(), files, strict=True):
            for file in rank_files:
                exporter = chrome if file.startswith("kineto") else execution_trace
                exporter.write(rank_trace, folder / file)
        card = job.meta.get("card") or _build_card(name, job, files)
        folder.joinpath(f"{name}.yaml").write_text("\n".join(format_yaml(card)) + "\n", encoding="utf-8")
        folder.joinpath(_METRICS).write_text(
            json.dumps({**_list_metrics(job), **(predicted or {})}, indent=1) + "\n", encoding="utf-8"
        )


def _list_trace_files(rank: int, trace: Trace) -> list[str]:
    files = [f"kineto_trace_{rank}.json"] if trace.events.height else []
    return [*files, *([f"torch_et_{rank}.json"] if trace.nodes.height else [])]


def _build_card(name: str, job: Job, files: list[list[str]]) -> dict[str, Any]:
    """Return a card from the run.json of a run, and from the traces where it says nothing."""
    run = job.meta.get("run")
    recorded = validate_run_facts(run if is_shallow(run) else None)
    valid = [validate_rank_facts(facts) for facts in recorded.get("ranks") or () if isinstance(facts, dict)]
    facts_by_rank = {facts["rank"]: facts for facts in valid if facts}
    ranks = []
    for (rank, trace), rank_files in zip(job.items(), files, strict=True):
        stated = {key: value for key, value in facts_by_rank.get(rank, {}).items() if value}
        ranks.append({**_describe_rank(rank, trace), **stated, "files": rank_files})
    sizes = [trace.meta.get("world_size") for trace in job.values()]
    size = recorded.get("world_size") or max((size for size in sizes if size), default=len(job))
    card = build_card(name, {**recorded, "ranks": ranks, "world_size": size})
    if not recorded and size > 1 and not any(facts["model"]["parallel"] for facts in ranks):
        # Without names or uses of groups, the ranks may share a model in any way.
        plan = card["Model-executor"]["model_plan_parallelization"]
        plan.update(dict.fromkeys(plan))
    return card


def _describe_rank(rank: int, trace: Trace) -> dict[str, Any]:
    """Return what a trace says of its rank, with the keys of run.json."""
    axes = trace.groups.drop_nulls("axis").group_by("axis").agg(pl.col("size").max()).rows()
    groups = [
        {"pg_name": name, "pg_desc": description, "ranks": json.loads(text)}
        for name, description, text in trace.groups.select("pg_name", "pg_desc", "ranks").rows()
        if name is not None and str(text).endswith("]") and "..." not in text
    ]
    return {
        "rank": rank,
        "host": trace.meta.get("host"),
        "device_name": next(iter(list_device_names(trace)), None),
        "backend": (trace.meta.get("distributed") or {}).get("backend"),
        "groups": groups,
        "model": {"parallel": {_AXES[axis]: size for axis, size in axes if axis in _AXES and size}},
    }


def _list_metrics(job: Job) -> dict[str, Any]:
    rows = answer(job, "ccl-bench").table.to_dicts()
    return {
        row.pop("metric"): {key: value for key, value in row.items() if value is not None} for row in rows
    }
