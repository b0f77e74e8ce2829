"""CCL-Bench's workload card, version 1, as far as a run knows itself.

Keys and their meaning: workload_card_template.yaml of CCL-Bench. What the run cannot know (where the model comes from,
what the network can do, who measured) stays empty for its people to fill in, and a card without our first line is
never written over.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .atomic_file import write_atomically

_FIRST_LINE = "# Written by etloom; fill in what is empty. Remove this line to keep the card as it is."
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_TRACE_TYPES = {"torch_et": "json", "observer": "json", "kineto_trace": "json", "nsys": "nsys"}


def write_card(folder: Path, run: dict[str, Any], scratch: Path) -> None:
    """Write `<name of the folder>.yaml` beside the traces, from the contents of run.json."""
    path = folder / f"{folder.name}.yaml"
    if path.exists() and not generated_cards(folder):
        return
    write_atomically(
        path, f"{_FIRST_LINE}\n" + "\n".join(_yaml_lines(build_card(folder.name, run), 0)) + "\n", scratch
    )


def generated_cards(folder: Path) -> list[Path]:
    """The card of a folder, where nobody has made it theirs."""
    path = folder / f"{folder.name}.yaml"
    try:
        return [path] if path.read_text(errors="replace").startswith(_FIRST_LINE) else []
    except OSError:  # there is none, or another rank removes the window
        return []


def build_card(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """The card of a run; null for what it cannot know."""
    ranks: list[dict[str, Any]] = run["ranks"]
    first: dict[str, Any] = ranks[0] if ranks else {}
    model: dict[str, Any] = max(
        (rank.get("model") or {} for rank in ranks),
        key=lambda facts: facts.get("parameters") or 0,
        default={},
    )
    world = run.get("world_size") or 1
    parts = infer_parallelism(ranks, world)
    versions = first.get("versions") or {}
    parameters = _sum_over_stages(ranks, "parameters", parts)
    hosts = {rank["host"] for rank in ranks}
    files = {file.rpartition("_")[0] for rank in ranks for file in rank.get("files") or ()}
    backend = first.get("backend")
    batch = model.get("batch_of_rank")
    shared = parts["dp_replicate"] * parts["dp_shard"]
    command = run.get("command")
    return {
        "version": 1,
        "description": ": ".join(part for part in (name, " ".join(command or ()), run.get("ended")) if part),
        "hf_url": None,
        "trace_url": None,
        "contributor": None,
        "contact": None,
        "workload": {
            "model": {
                "phase": None
                if model.get("training") is None
                else ("training" if model["training"] else "inference"),
                "moe": model.get("moe"),
                "granularity": "model_fwd_bwd_pass" if model.get("training") else "model_fwd",
                "model_family": model.get("class"),
                "precision": _PRECISIONS.get(model.get("dtype") or "", model.get("dtype")),
                "epochs": None,
                "iteration": max((len(rank["steps"]) for rank in ranks if rank.get("steps")), default=None),
                "model_arch": {
                    "num_params": parameters,
                    "num_params_embedding": _sum_over_stages(ranks, "embedding_parameters", parts),
                    "num_layers": model.get("layers"),
                    "num_heads": model.get("heads"),
                    "head_dim": model.get("head_dim"),
                },
            },
            "data": {
                "batch_size": None if batch is None else batch * shared,
                "seq_len": model.get("sequence"),
                "input_len": None,
                "output_len": None,
                "dataset": model.get("dataset"),
            },
            "hardware": {
                "network_topo": {"topology": None, "bandwidth_gbps": None},
                "xpu_spec": {
                    "type": "GPU" if first.get("device_name") else "CPU",
                    "model": first.get("device_name"),
                    "total_count": world,
                    "count_per_node": first.get("local_world_size")
                    or (len(ranks) // len(hosts) if len(ranks) == world else None),
                },
                "driver_version": versions.get("driver"),
            },
        },
        "Model-executor": {
            "framework": {
                "name": f"PyTorch {versions['torch']}" if versions.get("torch") else None,
                "compiler_tool_selection": None,
            },
            "model_plan_parallelization": {**parts, "pp_mb": None},
            "communication_library": {
                "name": backend,
                "version": versions.get("nccl") if backend == "nccl" else None,
                "env": first.get("environment") or {},
            },
            "protocol_selection": [],
            "communicator_groups": _communicator_groups(ranks),
        },
        "metric_source": {
            "traces": sorted({_TRACE_TYPES[file] for file in files & _TRACE_TYPES.keys()}),
            "metrics_specific_trace": [],
        },
    }


def infer_parallelism(ranks: list[dict[str, Any]], world: int) -> dict[str, int]:
    """The size of each kind of parallelism, 1 for none.

    What the model's own objects say, else what the groups' names do; what remains of the world replicates the data.
    """
    parts = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"), 1)
    for rank in ranks:
        for part, size in ((rank.get("model") or {}).get("parallel") or {}).items():
            parts[part] = max(parts[part], size)
    cut = parts["dp_shard"] * parts["tp"] * parts["pp"] * parts["cp"]
    if parts["dp_replicate"] == 1 and world % cut == 0:
        parts["dp_replicate"] = world // cut
    return parts


def _sum_over_stages(ranks: list[dict[str, Any]], name: str, parts: dict[str, int]) -> int | None:
    """A number of the whole model: of the largest rank, or the sum over the stages of a pipeline."""
    found = [rank["model"][name] for rank in ranks if (rank.get("model") or {}).get(name) is not None]
    if not found or parts["pp"] == 1:
        return max(found, default=None)
    # Every stage is held by as many ranks.
    return sum(found) * parts["pp"] // len(found) if len(found) == len(ranks) else None


def _communicator_groups(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The communicator groups of all ranks, each once."""
    found: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        for group in rank.get("groups") or ():
            row = {"name": group["pg_name"], "description": group.get("pg_desc"), "ranks": group["ranks"]}
            found.setdefault(json.dumps(row), row)
    return [found[key] for key in sorted(found)]


def _yaml_lines(value: Any, depth: int) -> list[str]:
    """Mappings and lists of mappings as YAML's blocks, anything else as JSON, of which YAML is a superset."""
    pad = "  " * depth
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            name = key if re.fullmatch(r"[A-Za-z_][\w-]*", key, re.ASCII) else json.dumps(key)
            if item and (isinstance(item, dict) or _is_yaml_block(item)):
                lines += [f"{pad}{name}:", *_yaml_lines(item, depth + 1)]
            else:
                lines.append(f"{pad}{name}: {'' if item is None else json.dumps(item)}".rstrip())
        return lines
    return [f"{pad}- {json.dumps(item)}" for item in value]


def _is_yaml_block(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and isinstance(item[0], dict)
