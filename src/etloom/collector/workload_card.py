"""Writes CCL-Bench's workload card, version 1, with the values that are known about a run.

Keys and their meaning: workload_card_template.yaml of CCL-Bench. What the run cannot know (the origin of the model,
the properties of the network, the author) stays empty for users to fill in. A card without the first line that etloom
writes is never overwritten.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .atomic_file import write_atomically

Facts = dict[str, Any]
# Kinds of parallelism, with names of mesh dimensions in use (torchtitan, Megatron, accelerate, FSDP's tutorials).
PARALLELISM_NAMES = {
    "dp_replicate": ("dp", "ddp", "data", "replicate", "dp_replicate", "data_parallel"),
    "dp_shard": ("fsdp", "shard", "dp_shard", "dp_shard_cp", "sharded"),
    "tp": ("tp", "tensor", "tensor_parallel", "model", "mp"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel", "stage"),
    "cp": ("cp", "context", "context_parallel", "sp", "sequence"),
    "ep": ("ep", "expert", "expert_parallel"),
}
_FIRST_LINE = "# Written by etloom; fill in what is empty. Remove this line to keep the card as it is."
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that are not text in YAML."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_TRACE_TYPES = {"torch_et": "json", "observer": "json", "kineto_trace": "json", "nsys": "nsys"}


def write_card(folder: Path, run: Facts, scratch: Path) -> None:
    """Write the workload card `<name of the folder>.yaml` next to the traces, from the contents of run.json."""
    path = folder / f"{folder.name}.yaml"
    if path.exists() and not generated_cards(folder):
        return
    lines = [_FIRST_LINE, *format_yaml(build_card(folder.name, run))]
    write_atomically(path, "\n".join(lines) + "\n", scratch)


def generated_cards(folder: Path) -> list[Path]:
    """Return the path of a folder's workload card as a list; empty if there is no card that etloom generated."""
    path = folder / f"{folder.name}.yaml"
    try:
        return [path] if path.read_text(errors="replace").startswith(_FIRST_LINE) else []
    except OSError:  # there is none, or another rank is removing the window
        return []


def build_card(name: str, run: Facts) -> Facts:
    """Return the workload card of a run as nested mappings, from the contents of run.json; unknown values are None."""
    ranks: list[Facts] = run["ranks"]
    first: Facts = ranks[0] if ranks else {}
    model: Facts = max(
        (rank.get("model") or {} for rank in ranks),
        key=lambda facts: facts.get("parameters") or 0,
        default={},
    )
    world_size = run.get("world_size") or 1
    parallelism = infer_parallelism(ranks, world_size)
    file_types = {file.rpartition("_")[0] for rank in ranks for file in rank.get("files") or ()}
    description = (name, " ".join(run.get("command") or ()), run.get("ended"))
    return {
        "version": 1,
        "description": ": ".join(part for part in description if part),
        "hf_url": None,
        "trace_url": None,
        "contributor": None,
        "contact": None,
        "workload": {
            "model": _model_section(ranks, model, parallelism),
            "data": _data_section(model, parallelism),
            "hardware": _hardware_section(ranks, first, world_size),
        },
        "Model-executor": _executor_section(ranks, first, parallelism),
        "metric_source": {
            "traces": sorted({_TRACE_TYPES[file_type] for file_type in file_types & _TRACE_TYPES.keys()}),
            "metrics_specific_trace": [],
        },
    }


def _model_section(ranks: list[Facts], model: Facts, parallelism: dict[str, int]) -> Facts:
    is_training = model.get("training")
    return {
        "phase": None if is_training is None else ("training" if is_training else "inference"),
        "moe": model.get("moe"),
        "granularity": None
        if is_training is None
        else ("model_fwd_bwd_pass" if is_training else "model_fwd"),
        "model_family": model.get("class"),
        "precision": _PRECISIONS.get(model.get("dtype") or "", model.get("dtype")),
        "epochs": None,
        "iteration": max((len(rank["steps"]) for rank in ranks if rank.get("steps")), default=None),
        "model_arch": {
            "num_params": _sum_over_stages(ranks, "parameters", parallelism),
            "num_params_embedding": _sum_over_stages(ranks, "embedding_parameters", parallelism),
            "num_layers": model.get("layers"),
            "num_heads": model.get("heads"),
            "head_dim": model.get("head_dim"),
        },
    }


def _data_section(model: Facts, parallelism: dict[str, int]) -> Facts:
    batch_size = model.get("batch_of_rank")
    replicas = parallelism["dp_replicate"] * parallelism["dp_shard"]
    return {
        "batch_size": None if batch_size is None else batch_size * replicas,
        "seq_len": model.get("sequence"),
        "input_len": None,
        "output_len": None,
        "dataset": model.get("dataset"),
    }


def _hardware_section(ranks: list[Facts], first: Facts, world_size: int) -> Facts:
    hosts = {rank.get("host") for rank in ranks}
    is_complete = bool(hosts) and None not in hosts and len(ranks) == world_size
    average_per_host = len(ranks) // len(hosts) if is_complete else None
    return {
        "network_topo": {"topology": None, "bandwidth_gbps": None},
        "xpu_spec": {
            "type": "GPU" if first.get("device_name") else "CPU",
            "model": first.get("device_name"),
            "total_count": world_size,
            "count_per_node": first.get("local_world_size") or average_per_host,
        },
        "driver_version": (first.get("versions") or {}).get("driver"),
    }


def _executor_section(ranks: list[Facts], first: Facts, parallelism: dict[str, int]) -> Facts:
    versions = first.get("versions") or {}
    backend = first.get("backend")
    return {
        "framework": {
            "name": f"PyTorch {versions['torch']}" if versions.get("torch") else None,
            "compiler_tool_selection": None,
        },
        "model_plan_parallelization": {**parallelism, "pp_mb": None},
        "communication_library": {
            "name": backend,
            "version": versions.get("nccl") if backend == "nccl" else None,
            "env": first.get("environment") or {},
        },
        "protocol_selection": [],
        "communicator_groups": _communicator_groups(ranks),
    }


def infer_parallelism(ranks: list[Facts], world_size: int) -> dict[str, int]:
    """Return the number of ranks per kind of parallelism (dp_replicate, tp, pp, ...); 1 for a kind that is not used.

    The sizes come from the model's own objects; the remaining ranks replicate the data.
    """
    sizes = dict.fromkeys(PARALLELISM_NAMES, 1)
    for rank in ranks:
        for kind, size in ((rank.get("model") or {}).get("parallel") or {}).items():
            sizes[kind] = max(sizes[kind], size)
    ranks_per_replica = sizes["dp_shard"] * sizes["tp"] * sizes["pp"] * sizes["cp"]
    if sizes["dp_replicate"] == 1 and world_size % ranks_per_replica == 0:
        sizes["dp_replicate"] = world_size // ranks_per_replica
    return sizes


def _sum_over_stages(ranks: list[Facts], name: str, parallelism: dict[str, int]) -> int | None:
    """Return a parameter count of the whole model: the maximum over ranks or, with pipeline stages, their sum."""
    counts = [rank["model"][name] for rank in ranks if (rank.get("model") or {}).get(name) is not None]
    if not counts or parallelism["pp"] == 1:
        return max(counts, default=None)
    # Every stage is on the same number of ranks.
    return sum(counts) * parallelism["pp"] // len(counts) if len(counts) == len(ranks) else None


def _communicator_groups(ranks: list[Facts]) -> list[Facts]:
    """Return the name, description and ranks of each process group of the run, without duplicates."""
    groups: dict[str, Facts] = {}
    for rank in ranks:
        for group in rank.get("groups") or ():
            row = {"name": group["pg_name"], "description": group.get("pg_desc"), "ranks": group["ranks"]}
            groups.setdefault(json.dumps(row), row)
    return [groups[key] for key in sorted(groups)]


def format_yaml(value: Any, depth: int = 0) -> list[str]:
    """Format a value as lines of YAML: mappings and lists of mappings as blocks, anything else as JSON."""
    pad = "  " * depth
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            is_bare = re.fullmatch(r"[A-Za-z_][\w-]*", key, re.ASCII) and key.lower() not in _YAML_WORDS
            name = key if is_bare else json.dumps(key)
            if item and (isinstance(item, dict) or _is_yaml_block(item)):
                lines += [f"{pad}{name}:", *format_yaml(item, depth + 1)]
            else:
                lines.append(f"{pad}{name}: {'' if item is None else json.dumps(item)}".rstrip())
        return lines
    return [f"{pad}- {json.dumps(item)}" for item in value]


def _is_yaml_block(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and isinstance(item[0], dict)
