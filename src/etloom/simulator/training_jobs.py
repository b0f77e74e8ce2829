"""Training jobs and clusters, as users describe them in YAML; the files of example jobs are in the folder jobs/.

A job:                                        A cluster:

    layers: 32                                    device: h100
    hidden: 4096                                  gpus: 1024
    heads: 32                                     gpus_per_node: 8          # default: the network's first level
    kv_heads: 8                                   network: dgx-h100         # or a YAML file, or its content
    ffn: 14336                                    memory_gib: 80            # default: the device's
    gated: true                                   price_per_gpu_hour: 2.5
    vocabulary: 128256
    sequence: 8192
    batch: 512                 # sequences per step
    precision: bf16            # or fp8: products with weights
    optimizer: adamw
    kernels: fused             # unfused: attention writes its scores
    recompute: full            # default: whichever is the fastest that fits; likewise sharding: zero3
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from etloom.analyses.flops.peaks import Peaks, lookup_peaks
from etloom.core.errors import EtloomError, InvalidValue, UnknownName
from etloom.simulator.network.topology import PRESETS, Topology, get_preset, parse_topology, read_topology
from etloom.simulator.training_shapes import ModelShape
from etloom.simulator.yaml_input import (
    check_keys,
    parse_count,
    parse_positive,
    parse_text,
    read_yaml,
    show_value,
)

MAX_GPUS = 1 << 17
_MAX_VALUE = 100
"""Characters of a value of --set."""
OPTIMIZER_BYTES = {"adamw": 12, "adamw-8bit": 6, "muon": 8, "momentum": 8, "sgd": 4}
"""Optimizer -> bytes of its state per parameter, with the parameter in single precision."""
PRECISIONS = ("bf16", "fp16", "fp8")
_KERNELS = ("fused", "torch", "unfused")
_SIZES = {
    "layers": 10_000, "hidden": 1 << 20, "heads": 1 << 14, "sequence": 1 << 27, "vocabulary": 1 << 24,
    "kv_heads": 1 << 14, "head_width": 1 << 16, "ffn": 1 << 22,
    "experts": 1 << 14, "top_k": 1 << 10, "expert_ffn": 1 << 22, "shared_experts": 1 << 10,
    "dense_layers": 10_000, "routed_nodes": 1 << 10, "kv_rank": 1 << 18, "q_rank": 1 << 18, "rope_width": 1 << 16,
}  # fmt: skip
"""Size of a model -> its largest value."""
_OPTIONAL = (
    "experts",
    "top_k",
    "shared_experts",
    "dense_layers",
    "routed_nodes",
    "kv_rank",
    "q_rank",
    "rope_width",
)
"""Sizes that may be 0."""
_REQUIRED = ("layers", "hidden", "heads", "sequence", "vocabulary", "batch")
SHARDINGS = ("none", "zero1", "zero2", "zero3")
RECOMPUTATIONS = ("none", "selective", "full")
_CHOICES = {
    "precision": PRECISIONS,
    "optimizer": tuple(OPTIMIZER_BYTES),
    "kernels": _KERNELS,
    "sharding": SHARDINGS,
    "recompute": RECOMPUTATIONS,
}
_CLUSTER_KEYS = (
    *("device", "gpus", "gpus_per_node", "network", "memory_gib", "price_per_gpu_hour"),
    *("host", "tflops", "bandwidth_gbs"),
)
_FLAGS = ("gated", "tied", "overlap_experts")
_DEVICES = {
    "dgx-a100": "A100 80GB SXM", "dgx-h100": "H100 SXM", "dgx-b200": "B200", "gb200-nvl72": "GB200",
    "mi300x": "MI300X", "aws-p4d": "A100 40GB", "aws-p5": "H100 SXM",
}  # fmt: skip
"""Preset of a network -> the device of its nodes."""


@dataclass(frozen=True)
class TrainingJob:
    """A model and how it is trained.

    Attributes:
        batch: sequences per step.
        kernels: fused: attention and element-wise operators, as in Transformer Engine; torch: compiled, with PyTorch's
            attention; unfused.
        overlap_experts: whether all-to-alls overlap with the computation of another micro-batch.
        sharding: one of SHARDINGS, None: any; ``recompute`` of RECOMPUTATIONS likewise.
    """

    name: str
    model: ModelShape
    batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    kernels: str = "fused"
    overlap_experts: bool = False
    sharding: str | None = None
    recompute: str | None = None

    @property
    def fused(self) -> bool:
        """Whether attention does not write its scores."""
        return self.kernels != "unfused"


class JobValue(NamedTuple):
    """A value of a job: its key as in YAML, how it is known (stated, default, set, inferred, assumed, recorded), and
    from what."""

    key: str
    value: Any
    basis: str
    source: str


def tabulate_values(values: Iterable[JobValue]) -> pl.DataFrame:
    """Return a table of the values of a recorded job: key (as in YAML), value, basis, and source.

    basis: inferred, assumed, set (instead of the recorded value), or recorded: of the recorded layout, which the ranked
    ones need not have.
    """
    rows = [
        (key, str(value).lower() if isinstance(value, bool) else str(value), *rest)
        for key, value, *rest in values
    ]
    return pl.DataFrame(rows, dict.fromkeys(JobValue._fields, pl.String), orient="row")


@dataclass(frozen=True)
class Cluster:
    """GPUs and the network between them.

    Attributes:
        memory_bytes: of a GPU.
        price: per GPU and hour, in any currency.
        host: factor of the times of work on the host.
    """

    name: str
    peaks: Peaks
    gpus: int
    topology: Topology
    memory_bytes: float
    price: float | None = None
    host: float = 1.0

    @property
    def node_size(self) -> int:
        """The GPUs of a node."""
        return self.topology.levels[0].size


def list_jobs() -> list[str]:
    """Return the names of the example jobs."""
    folder = resources.files("etloom.simulator").joinpath("jobs")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def list_clusters() -> list[str]:
    """Return the names of the clusters that need no file."""
    return list(_DEVICES)


def names_recording(job: str | os.PathLike[str]) -> bool:
    """Return whether the text for a job is a path of something else than a YAML file."""
    return Path(job).suffix not in (".yaml", ".yml") and str(job) not in list_jobs() and Path(job).exists()


def read_job(job: str | os.PathLike[str], changes: Mapping[str, Any] | None = None) -> TrainingJob:
    """Read a job from a YAML file, or the example of that name. Raises EtloomError.

    Args:
        job: the file, or a name such as llama3-8b.
        changes: values by key that replace those of the file.
    """
    path = Path(job)
    if str(job) in list_jobs():
        with resources.as_file(resources.files("etloom.simulator").joinpath("jobs", f"{job}.yaml")) as file:
            return parse_job(read_yaml(file, "job"), path.name, changes)
    if not path.suffix and not path.exists():
        raise UnknownName("job", str(job), list_jobs(), option="job")
    document = read_yaml(path, "job", f"expected a YAML file, or one of {', '.join(list_jobs())}")
    parse_changed: Any = partial(parse_job, changes=changes)
    parsed: TrainingJob = _name_file(path, parse_changed, document)
    return parsed


def _name_file(path: Path, parse: Any, document: Any) -> Any:
    """Return what ``parse`` makes of a document; an error names its file."""
    try:
        return parse(document, path.stem)
    except EtloomError as error:
        raise EtloomError(f"{path}: {error.what}", remedy=error.remedy) from None


def parse_changes(text: str) -> dict[str, Any]:
    """Parse values of a job by key, such as batch=512,optimizer=sgd. Raises InvalidValue."""
    changes: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not (key and equals and value):
            raise InvalidValue(f"expected KEY=VALUE, such as batch=512, got {part[:60]!r}", option="set")
        if key in changes or len(value) > _MAX_VALUE:
            problem = "is set twice" if key in changes else f"has more than {_MAX_VALUE} characters"
            raise InvalidValue(f"{key[:60]!r} {problem}", option="set")
        flags = {"true": True, "false": False}
        changes[key] = int(value) if value.isdecimal() else flags.get(value, value)
    return changes


def parse_job(document: Any, name: str, changes: Mapping[str, Any] | None = None) -> TrainingJob:
    """Convert a job, as read from YAML, to `TrainingJob`. Raises EtloomError that names the wrong key and value.

    Args:
        document: keys and values.
        name: of the job.
        changes: values by key that replace those of the document.
    """
    if isinstance(document, dict):
        document = {**document, **(changes or {})}
    check_keys(document, {*_SIZES, *_CHOICES, *_FLAGS, "batch"}, "job", _REQUIRED)
    sizes = {
        key: float(parse_count(document[key], key, most, 0 if key in _OPTIONAL else 1))
        for key, most in _SIZES.items()
        if key in document
    }
    for key in _FLAGS:
        if not isinstance(document.get(key, False), bool):
            raise EtloomError(f"{key}: expected true or false, got {show_value(document[key])}")
    for key, known in _CHOICES.items():
        if key in document and document[key] not in known:
            raise UnknownName(key, parse_text(document[key]), known)
    _check_sizes(sizes)
    model = ModelShape(**sizes, gated=document.get("gated", False), tied=document.get("tied", False))
    return TrainingJob(
        name,
        model,
        parse_count(document["batch"], "batch", 1 << 24),
        document.get("precision", "bf16"),
        document.get("optimizer", "adamw"),
        document.get("kernels", "fused"),
        document.get("overlap_experts", False),
        document.get("sharding"),
        document.get("recompute"),
    )


def _check_sizes(sizes: Mapping[str, float]) -> None:
    """Raise EtloomError if sizes of a model contradict each other."""

    def get(key: str, default: float = 0.0) -> float:
        return sizes.get(key, default)

    heads = get("heads")
    problems = {
        "hidden: expected a multiple of heads, or head_width": "head_width" not in sizes
        and get("hidden") % heads,
        "kv_heads: expected a divisor of heads": heads % get("kv_heads", heads),
        "experts is missing, which top_k, expert_ffn, shared_experts, dense_layers and routed_nodes need": not get(
            "experts"
        )
        and any(map(get, ("top_k", "expert_ffn", "shared_experts", "dense_layers", "routed_nodes"))),
        "experts: expert_ffn and top_k are missing": get("experts")
        and not (get("expert_ffn") and get("top_k")),
        "top_k: expected at most the number of experts": get("top_k") > get("experts"),
        "routed_nodes: expected at most top_k": get("routed_nodes") > get("top_k"),
        "dense_layers: expected fewer than layers": get("dense_layers") >= get("layers"),
        "kv_rank is missing, which q_rank and rope_width need": (get("q_rank") or get("rope_width"))
        and not get("kv_rank"),
    }
    for text, is_wrong in problems.items():
        if is_wrong:
            raise EtloomError(text)


def read_cluster(
    cluster: str | os.PathLike[str], gpus: int | None = None, find_file: Callable[[Path], Path] = Path
) -> Cluster:
    """Read a cluster from a YAML file, or the nodes of a preset network. Raises EtloomError.

    Args:
        cluster: the file, or a name such as dgx-h100.
        gpus: another number of GPUs than that of the cluster.
        find_file: returns the path of the file that the cluster names as its network, relative to its own, or raises.
    """
    path = Path(cluster)
    name = str(cluster)
    if name in _DEVICES:
        size = get_preset(name).size if gpus is None else gpus
        return parse_cluster({"device": _DEVICES[name], "network": name, "gpus": size}, name)
    if not path.suffix and not path.exists():
        raise UnknownName("cluster", name, list(_DEVICES), option="cluster")
    document = read_yaml(path, "cluster", f"expected a YAML file, or one of {', '.join(_DEVICES)}")
    if isinstance(document, dict):
        document |= {} if gpus is None else {"gpus": gpus}
        network = document.get("network")
        if isinstance(network, str) and Path(network).suffix in (".yaml", ".yml"):
            document["network"] = str(find_file(path.parent / network))
    parsed: Cluster = _name_file(path, parse_cluster, document)
    return parsed


def parse_cluster(document: Any, name: str) -> Cluster:
    """Convert a cluster, as read from YAML, to `Cluster`. Raises EtloomError that names the wrong key and value."""
    check_keys(document, _CLUSTER_KEYS, "cluster", ("device", "gpus", "network"))
    device = document["device"]
    if not isinstance(device, str):
        raise EtloomError(f"device: expected a name, got {show_value(device)}")
    try:
        peaks = lookup_peaks(device)
    except UnknownName as error:
        raise EtloomError(f"device: {error.what}", remedy=error.remedy) from None
    peaks = _override_peaks(peaks, document)
    memory = document.get("memory_gib", peaks.memory_gib)
    if memory is None:
        raise EtloomError(f"memory_gib is missing: the memory of the {peaks.name} is not known")
    price = document.get("price_per_gpu_hour")
    return Cluster(
        name,
        peaks,
        parse_count(document["gpus"], "gpus", MAX_GPUS),
        _parse_topology(document),
        parse_positive(memory, "memory_gib", 1e5) * 2**30,
        None if price is None else parse_positive(price, "price_per_gpu_hour", 1e6),
        parse_positive(document.get("host", 1.0), "host", 1e3),
    )


def _override_peaks(peaks: Peaks, document: Mapping[str, Any]) -> Peaks:
    """Return the peaks with a cluster's bandwidth, and scaled to its TFLOP/s of half precision (a limit of power)."""
    if "bandwidth_gbs" in document:
        bandwidth = parse_positive(document["bandwidth_gbs"], "bandwidth_gbs", 1e6)
        peaks = replace(peaks, bandwidth_gbs=bandwidth)
    half = peaks.tflops("bf16") or peaks.tflops("fp16")
    if "tflops" in document:
        if half is None:
            raise InvalidValue(f"{peaks.name} has no known peak of half precision to scale", option="tflops")
        factor = parse_positive(document["tflops"], "tflops", 1e6) / half
        scaled = {precision: factor * rate for precision, rate in peaks.matrix_tflops.items()}
        peaks = replace(peaks, matrix_tflops=scaled)
    return peaks


def _parse_topology(document: Mapping[str, Any]) -> Topology:
    """Return the network of a cluster, with its number of GPUs per node."""
    network = document["network"]
    if isinstance(network, dict):
        topology = parse_topology(network)
    elif (text := parse_text(network)) in PRESETS:
        topology = get_preset(text)
    elif Path(text).suffix in (".yaml", ".yml"):
        topology = read_topology(Path(text))
    else:
        raise EtloomError(
            f"network: unknown network {show_value(network)}",
            remedy=f"expected levels, a YAML file, or one of {', '.join(PRESETS)}",
        )
    if "gpus_per_node" not in document:
        return topology
    size = parse_count(document["gpus_per_node"], "gpus_per_node", MAX_GPUS)
    first, *others = topology.levels
    return replace(topology, levels=(replace(first, size=size), *others))
