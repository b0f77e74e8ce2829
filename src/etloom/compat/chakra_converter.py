"""The interface of mlcommons/chakra's converter: ``chakra_converter PyTorch`` and ``chakra_converter Text``.

The intended differences are listed in docs/coming-from-chakra.md: above all, GPU activity has successors, and
``--simulate`` reports how long the nodes take.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from etloom import formats
from etloom.compat._command import run_command
from etloom.core.errors import EtloomError, ReadError
from etloom.core.paths import expand_home
from etloom.core.trace import Job, Trace
from etloom.exports import chakra
from etloom.exports.chakra_lint.list_schedule import schedule_nodes
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import load_file, rank_path, write_messages
from etloom.linker import link


def convert(source: str | PathLike[str], target: str | PathLike[str]) -> None:
    """Convert an ET+ file, or any trace of one rank, to a Chakra .et file.

    Raises ReadError, LinkError, EtloomError.
    """
    trace = formats.read(source)
    if isinstance(trace, Job):
        raise EtloomError(
            f"contains {len(trace)} ranks; the converter writes one",
            where=source,
            remedy="use etloom export, which writes one file per rank",
        )
    linked = _link_etplus(trace) if "etplus" in trace.meta.get("formats", ()) else link(trace)
    rank = linked.rank or 0
    chakra.write_ranks({rank: linked}, {rank: expand_home(target)})


def _link_etplus(trace: Trace) -> Trace:
    """Link the Trace of an ET+ file; its operators replace the launch calls, which an ET+ file does not contain."""
    events = trace.events
    device = trace.launches.select(id="device_event", called=pl.col("operator").cast(pl.Int64) + 1)
    callers = (
        device.select(id=(pl.col("called") - 1).cast(pl.UInt32), calls="called").unique("id").drop_nulls()
    )
    correlations = events.select("id").join(device, on="id", how="left", maintain_order="left")
    correlations = correlations.join(callers, on="id", how="left", maintain_order="left")
    linked = link(
        trace.replace(
            events=events.with_columns(correlation=pl.coalesce(correlations["called"], correlations["calls"]))
        )
    )
    node_events = trace.links.unique("node", keep="first")
    waits = (
        trace.dependencies.filter(pl.col("kind").cast(pl.String) == "sync")
        .join(node_events.select("node", "event"), on="node")
        .join(node_events.select(on="node", device="event"), on="on")
        .select("event", on="device", kind=pl.lit("Stream Sync"), sync="event", how=pl.lit("recorded"))
    )
    return linked.replace(sync_dependencies=waits)


def describe_schedule(path: Path) -> str:
    """Return a line with the simulated time of the nodes of a .et file, and the number of nodes that never start.

    At most one operator, one computation and one communication run at a time.
    """
    nodes = load_file(path).nodes
    schedule = schedule_nodes(nodes)
    stuck = f"; {len(schedule.stuck):,} never start" if schedule.stuck else ""
    return f"{len(schedule.end):,} nodes take {schedule.makespan_ns / 1e6:.3f} ms{stuck}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_converter``: exit status 0, 1 for an error reported in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="chakra_converter",
        description="Convert traces to the Chakra format (etloom's replacement for the command of mlcommons/chakra).",
    )
    parser.add_argument("--log-filename", help="accepted and ignored: messages go to stderr")
    kinds = parser.add_subparsers(dest="kind", required=True)
    torch = kinds.add_parser("PyTorch", help="an ET+ of chakra_trace_link, or any trace that etloom reads")
    torch.add_argument("--input", required=True, help="the ET+")
    torch.add_argument("--output", required=True, help="the .et to write; compressed if its name ends in .gz")
    torch.add_argument("--simulate", action="store_true", help="print how long the nodes take")
    text = kinds.add_parser("Text", help="a layer description in the format of ASTRA-sim 1.0")
    text.add_argument("--input", required=True, help="the text")
    text.add_argument("--output", required=True, help="writes OUTPUT.NPU.et for each NPU")
    text.add_argument("--num-npus", type=int, required=True)
    text.add_argument("--num-passes", type=int, required=True)
    args = parser.parse_args(arguments)

    def work() -> None:
        if args.kind == "Text":
            convert_text(expand_home(args.input), expand_home(args.output), args.num_npus, args.num_passes)
            return
        convert(args.input, args.output)
        if args.simulate:
            print(describe_schedule(expand_home(args.output)))

    return run_command("chakra_converter", work)


# Converts ASTRA-sim 1.0's description of a neural network, layer by layer, to Chakra nodes.
#
#     DATA
#     2
#     conv1 -1 100 NONE 0 120 NONE 0 80 ALLREDUCE 65536 10
#     fc    -1  50 NONE 0  60 NONE 0 40 ALLREDUCE 4096 10
#
# A layer: name, unused, then time in us, collective and its bytes of the forward pass, of the gradient of the input
# and of that of the weights, and a last number that is not used. The first line specifies which of the collectives
# take place:
#
#     MICRO                                  that of the weights, layers on their own
#     DATA                                   that of the weights; the layer's next forward pass waits for it
#     MODEL                                  those of forward and input, on the way
#     HYBRID_DATA_MODEL, HYBRID_MODEL_DATA   all three, on the way and of the weights
#     HYBRID_DLRM N, HYBRID_DLRM_ENHANCED N  as those, but layer 0 (embeddings) runs concurrently with the layers before
#     N
#
# NONE creates no node. Every pass runs forward through all layers and back.

_KINDS = (
    "MICRO",
    "DATA",
    "MODEL",
    "HYBRID_DATA_MODEL",
    "HYBRID_MODEL_DATA",
    "HYBRID_DLRM",
    "HYBRID_DLRM_ENHANCED",
)
_COLLECTIVES = {name.replace("_", "").upper(): number for number, name in pb.COLLECTIVES.items()}
_COMP, _COLL = 4, 7
_COLUMNS = 12

Step = tuple[int, str | None, int]
"""Time in us, collective, its bytes."""


@dataclass(frozen=True)
class Layer:
    name: str
    forward: Step
    input: Step
    weight: Step


def convert_text(source: Path, target: Path, npus: int, passes: int) -> None:
    """Convert a layer description to a Chakra file TARGET.NPU.et for each of ``npus`` NPUs. Raises ReadError."""
    if npus < 1 or passes < 1:
        raise ReadError("expected at least one NPU and one pass", where=source)
    kind, last_bottom, layers = _read_text(source)
    metadata = pb.GlobalMetadata(version="0.0.4")
    metadata.attr.add(name="schema").string_val = "1.0.2-chakra.1.0.0"
    metadata.attr.add(name="input_file").string_val = source.read_text()
    network = _Network(kind, last_bottom, layers)
    last: int | None = None
    for _ in range(passes):
        last = network.add_pass(last)
    for npu in range(npus):
        write_messages(rank_path(target.with_name(f"{target.name}.et"), npu), metadata, network.nodes)


def _read_text(source: Path) -> tuple[str, int, list[Layer]]:
    try:
        lines = [line.split() for line in source.read_text().splitlines() if line.strip()]
        kind, *more = lines[0]
        count = int(lines[1][0])
        layers = [_layer(line) for line in lines[2:]]
        last_bottom = int(more[0]) if "DLRM" in kind else 0
    except (IndexError, ValueError, UnicodeDecodeError) as error:
        raise ReadError(f"is not a text description of layers: {error}", where=source) from None
    if kind not in _KINDS:
        raise ReadError(f"unknown parallelism {kind!r}", where=source, remedy=f"known: {', '.join(_KINDS)}")
    if count != len(layers) or not layers:
        raise ReadError(
            f"the header states {count} layers, but the file contains {len(layers)}", where=source
        )
    if not 0 <= last_bottom < len(layers):
        raise ReadError(
            f"the header names layer {last_bottom}, which the file does not contain", where=source
        )
    return kind, last_bottom, layers


def _layer(line: list[str]) -> Layer:
    if len(line) < _COLUMNS:
        raise ValueError(f"a layer has {len(line)} columns instead of {_COLUMNS}: {' '.join(line)[:60]}")
    return Layer(line[0], _step(line[2:5]), _step(line[5:8]), _step(line[8:11]))


def _step(columns: list[str]) -> Step:
    time, collective, size = int(columns[0]), columns[1].upper(), int(columns[2])
    # A suffix specifies the algorithm, as in ALLREDUCE_HIERARCHICAL.
    begins = [name for name in _COLLECTIVES if collective.replace("_", "").startswith(name)]
    collective_name = max(begins, key=len, default=None)
    if collective != "NONE" and collective_name is None:
        raise ValueError(f"unknown collective {collective!r}")
    if not (0 <= time < 1 << 63 and 0 <= size < 1 << 63):
        raise ValueError(f"time {time} us or size {size} B is out of range; expected 0 to 2^63 - 1")
    return time, collective_name, size


@dataclass
class _Network:
    """Adds the nodes of passes through the layers, in the order of mlcommons/chakra's converter.

    Attributes:
        kind: one of `_KINDS`; selects the collectives and the order of gradients. If the gradient of a layer's input is
            computed before the gradient of its weights, the latter hides the collective of the input.
        bottom: the layer that waits for the output of layer 0; layer 0 runs concurrently with the layers before it.
            0 if no layer waits.
        synced: the collective of the weights of each layer in the previous pass.
    """

    kind: str
    bottom: int
    layers: list[Layer]
    nodes: list[Any] = field(default_factory=list)
    synced: dict[int, int | None] = field(default_factory=dict)

    def add_pass(self, last: int | None) -> int | None:
        """Add the nodes of a pass that follows the node ``last``, and return the node that the next pass follows."""
        if self.kind == "MICRO":
            for layer in self.layers:
                self._communicate(layer, "WG_COMM", layer.weight, set())
            return None
        layer_0_sent: int | None = None
        for number, layer in enumerate(self.layers):
            on = {last, self.synced.get(number), layer_0_sent if number == self.bottom else None}
            last = self._compute(layer, "FWD", layer.forward, on)
            if self.kind != "DATA":
                sent = self._communicate(layer, "FWD_COMM", layer.forward, {last})
                if self.bottom and number == 0:
                    layer_0_sent = sent
                else:
                    last = sent
        if "MODEL" in self.kind:
            return self._add_inputs_first(last)
        for number, layer in reversed(list(enumerate(self.layers))):
            if self.bottom and number == 0:
                last = layer_0_sent  # layer 0 continues when its gradient has arrived
            last = self._compute(layer, "WG", layer.weight, {last})
            self.synced[number] = self._communicate(layer, "WG_COMM", layer.weight, {last})
            if number:
                last = self._compute(layer, "IG", layer.input, {last})
                if self.kind != "DATA":
                    last = self._communicate(layer, "IG_COMM", layer.input, {last})
            if self.bottom and number == self.bottom:
                layer_0_sent = self._communicate(self.layers[0], "IG_COMM", self.layers[0].input, {last})
        return last

    def _add_inputs_first(self, last: int | None) -> int | None:
        """Add the nodes of a backward pass that computes each layer's input gradient before its weight gradient.

        The next layer waits for the gradient of the weights and for the communicated gradient of the input.
        """
        on = {last}
        for number, layer in reversed(list(enumerate(self.layers))):
            gradient = self._compute(layer, "IG", layer.input, on)
            sent = self._communicate(layer, "IG_COMM", layer.input, {gradient}) if number else None
            last = self._compute(layer, "WG", layer.weight, {gradient})
            if self.kind != "MODEL":
                self.synced[number] = self._communicate(layer, "WG_COMM", layer.weight, {last})
            on = {last, sent}
        return last

    def _compute(self, layer: Layer, label: str, step: Step, on: set[int | None]) -> int:
        return self._add(f"{layer.name}_{label}", on, type=_COMP, duration_micros=step[0])

    def _communicate(self, layer: Layer, label: str, step: Step, on: set[int | None]) -> int | None:
        """Add a node for a layer's collective and return its id; without a collective, the largest id in ``on``."""
        if step[1] is None:
            return max((node_id for node_id in on if node_id is not None), default=None)
        node_id = self._add(f"{layer.name}_{label}_{step[1]}", on, type=_COLL)
        for name, value in (("comm_type", _COLLECTIVES[step[1]]), ("comm_size", step[2])):
            self.nodes[-1].attr.add(name=name).int64_val = value
        return node_id

    def _add(self, name: str, on: set[int | None], **fields: Any) -> int:
        node_id = len(self.nodes) + 1
        dependencies = sorted(dependency for dependency in on if dependency is not None)
        self.nodes.append(pb.Node(id=node_id, name=name, data_deps=dependencies, **fields))
        self.nodes[-1].attr.add(name="is_cpu_op").bool_val = False
        return node_id
