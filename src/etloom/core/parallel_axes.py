"""Recognizes axes of parallelism (data, tensor, pipeline, ...) in the names of process groups.

The spellings are those of Megatron, DeepSpeed, torchtitan, FSDP, vLLM, SGLang, JAX and PyTorch's device meshes. A name
counts only if every word of it is known: "my_data_loader" names no axis.
"""

from __future__ import annotations

import re
from functools import cache

AXES = ("dp", "tp", "pp", "cp", "ep")
"""Data, tensor, pipeline, context (sequence) and expert parallelism, in the order of a combined label."""

WORLD = "world"
"""The label of the group of all ranks if it serves no single axis."""

EMBEDDING = "embedding"
"""The label of Megatron's groups of the pipeline stages that share an embedding."""

_AXIS_BY_WORD = {
    word: axis
    for axis, words in {
        "dp": "dp ddp data replicate replica shard sharded fsdp hsdp zero batch",
        "tp": "tp tensor",
        "pp": "pp pipe pipeline stage",
        "cp": "cp context sequence sp ulysses ring dcp pcp",
        "ep": "ep",
        "expert-dp": "edp efsdp",
        "expert-tp": "etp",
    }.items()
    for word in words.split()
}
_EXPERT_WORDS = ("expert", "experts", "moe")
_FILLERS = frozenset(
    word
    for words in (
        "group groups pg mesh dim parallel parallelism model mp and with intra inter partial hierarchical",
        "attn attention nccl gloo rccl device cpu cuda gpu process ag rs comm subgroup loss grad",
    )
    for word in words.split()
)
_WHOLE_WORLD = frozenset({"default pg", "default", "world", "world group", "mesh world", "global"})
_SPECIAL = {
    "model parallel group": "tp+pp",
    "model parallel": "tp",
    "mesh model": "tp",
    "model": "tp",
    "mp": "tp",
    "mesh mp": "tp",
    "embedding group": EMBEDDING,
    "position embedding group": EMBEDDING,
}


@cache
def parse_axis(name: str | None) -> str | None:
    """Return the axes of parallelism (dp, tp, pp, ...) that the name or description of a process group states.

    Args:
        name: Such as ``TENSOR_MODEL_PARALLEL_GROUP``, ``mesh_dp_shard``, ``tp:0``.

    Returns:
        One of `AXES`; several joined by ``+`` (``tp+dp``); ``expert-dp`` and ``expert-tp`` for the groups within which
        experts are replicated or split; `WORLD` or `EMBEDDING`; None if the name states no axis.
    """
    words = [re.sub(r"\d+$", "", word) for word in re.split(r"[^a-z0-9]+", (name or "").lower())]
    words = [word for word in words if word]
    text = " ".join(words)
    if text in _WHOLE_WORLD:
        return WORLD
    if text in _SPECIAL:
        return _SPECIAL[text]
    axes: list[str] = []
    expert = False
    for position, word in enumerate(words):
        following = words[position + 1] if position + 1 < len(words) else ""
        if word in _EXPERT_WORDS:
            expert = True
            if _AXIS_BY_WORD.get(following) is None:
                axes.append("ep")
        elif word in _AXIS_BY_WORD:
            axis = _AXIS_BY_WORD[word]
            axes.append(f"expert-{axis}" if expert and axis in ("dp", "tp") else axis)
        elif expert and word == "model" and "ep" not in axes:
            axes.append("ep")  # Megatron: EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP
        elif word not in _FILLERS:
            return None
    return "+".join(dict.fromkeys(sorted(axes, key=_sort_position))) or None


def _sort_position(axis: str) -> int:
    return AXES.index(axis.removeprefix("expert-"))
