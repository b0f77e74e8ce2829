"""The interface of mlcommons/chakra's trace linker: `TraceLinker` and the command ``chakra_trace_link``.

The output is ET+ as `etloom.exports.etplus` writes it: the peer's names of members, readable by chakra_converter. The
intended differences in flags, links and the file are listed in docs/coming-from-chakra.md. In short:

- Traces of different programs are refused (LinkError) instead of paired by ids that agree by chance.
- Traces without ProfilerStep, on the CPU alone, gzipped, from ROCm, under relative paths are linked.
- Host nodes keep their ids; device nodes come after them, memsets too, with their own attributes.
- ``inter_thread_dep`` names an operator that had ended; ``sync_dep`` is filled on every step.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from etloom import formats
from etloom.api import export
from etloom.api.arguments import writing
from etloom.compat._command import run_command
from etloom.core.errors import InvalidValue
from etloom.core.paths import expand_home
from etloom.core.trace import Trace
from etloom.formats.execution_trace.writer import write_document
from etloom.linker import link
from etloom.linker.merging import select_rank

StrPath = str | PathLike[str]

_log = logging.getLogger("etloom.compat.chakra")


class ChakraHostTraceLoader:
    """Reads the host trace of a rank from a file."""

    def load(self, path: StrPath, rank: int | None = None) -> Trace:
        """Read a trace file; ``rank`` selects a rank of a file that contains several. Raises ReadError."""
        return select_rank(formats.read(expand_home(path)), rank, Path(path))


class ChakraDeviceTraceLoader(ChakraHostTraceLoader):
    """Reads the device trace of a rank from a file."""


class UniqueIdAssigner:
    """Assigns new ids to operators: consecutive numbers in the order of the first request."""

    def __init__(self) -> None:
        self.next_id = 0
        self.original_to_new_ids: dict[int, int] = {}

    def assign_or_retrieve_id(self, original_id: int) -> int:
        """Return the new id of an operator; the first request assigns it."""
        if original_id not in self.original_to_new_ids:
            self.original_to_new_ids[original_id] = self.generate_new_id()
        return self.original_to_new_ids[original_id]

    def generate_new_id(self) -> int:
        """Return an id that no operator has."""
        self.next_id += 1
        return self.next_id - 1

    def lookup_new_id(self, original_id: int) -> int:
        """Return the new id of an operator, or its old id if it has no new one."""
        return self.original_to_new_ids.get(original_id, original_id)


class TraceLinker:
    """Links a host execution trace with a device trace of one rank.

    `link` does everything. The steps have Chakra's names, but take and return etloom's Traces and tables, not lists of
    operators.

    Attributes:
        chakra_host_trace_loader: Reads the host trace.
        chakra_device_trace_loader: Reads the device trace.
        id_assigner: Not used by the steps: operators keep their ids, and GPU activities get the next free ones.
    """

    def __init__(self) -> None:
        self.chakra_host_trace_loader = ChakraHostTraceLoader()
        self.chakra_device_trace_loader = ChakraDeviceTraceLoader()
        self.id_assigner = UniqueIdAssigner()

    def link(self, *arguments: StrPath | int, **named: StrPath | int | None) -> None:
        """Link two traces and write an ET+ file: ``link(rank, host, device, output)``; the rank is optional.

        Args:
            arguments: The rank and the paths, in Chakra's order.
            named: The same by name: rank, chakra_host_trace, chakra_device_trace, output_file. The rank is optional:
                the one to select from a device trace of several ranks (Nsight), otherwise that of both traces.

        Raises:
            ReadError, LinkError, EtloomError: As `etloom.link` and `etloom.export`.
        """
        rank, host_path, device_path, output_file = _bind_link_arguments(arguments, named)
        host = self.chakra_host_trace_loader.load(host_path, rank)
        device = self.chakra_device_trace_loader.load(device_path, rank)
        linked = self.link_traces(host, device)
        for name, severity, count, example in linked.stats.rows():
            if name.startswith("link.") or severity != "info":
                level = logging.INFO if severity == "info" else logging.WARNING
                _log.log(level, "%s: %d (%s)", name, count, example)
        _log.info("linked: %s", linked.meta.get("link"))
        export(linked, output_file, "etplus")

    def link_traces(self, host: Trace, device: Trace, threshold: float = 1000) -> Trace:
        """Link a host and a device trace; threshold: see `enforce_inter_thread_order`. Raises LinkError."""
        return link(host, device, inter_thread_threshold_us=threshold)

    def enforce_inter_thread_order(self, device: Trace, threshold: float = 1000) -> pl.DataFrame:
        """Return dependencies between threads: event (an operator), after (the operator it waited for), kind.

        Args:
            device: A device trace, or a linked Trace.
            threshold: Pause of a thread, in us, after which its next operator depends on another thread.
        """
        return link(device, inter_thread_threshold_us=threshold).thread_dependencies

    def map_host_to_device_ops(self, linked: Trace) -> dict[int, int]:
        """Return {id of a host operator in the execution trace: id of its event in ``linked.events``}."""
        pairs = linked.links.join(linked.nodes.select("id", "et_id"), left_on="node", right_on="id")
        return dict(pairs.select("et_id", "event").iter_rows())

    def group_gpu_ops_by_cpu_launchers(self, linked: Trace) -> dict[int, list[int]]:
        """Return {id of an operator's event: ids of the events of the GPU activities it launched, ascending}."""
        launches = linked.launches.drop_nulls(["operator", "device_event"]).sort("device_event")
        grouped = launches.group_by("operator", maintain_order=True).agg("device_event")
        return dict(grouped.iter_rows())

    def construct_et_plus_data(self, linked: Trace) -> dict[str, Any]:
        """Return the ET+ document of a linked Trace. Raises EtloomError."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rank.etplus.json"
            export(linked, path, "etplus")
            document: dict[str, Any] = json.loads(path.read_bytes())
        return document

    def dump_chakra_execution_trace_plus(self, data: Mapping[str, Any], output_file: StrPath) -> None:
        """Write an ET+ document to a file, compressed if its name ends in .gz. Raises EtloomError."""
        header = {name: value for name, value in data.items() if name != "nodes"}
        nodes = pl.Series([json.dumps(node) for node in data["nodes"]], dtype=pl.String)
        target = expand_home(output_file)
        with writing(target):
            write_document(target, header, iter([nodes]))


_LINK_ARGUMENTS = ("chakra_host_trace", "chakra_device_trace", "output_file")


def _bind_link_arguments(
    arguments: Sequence[StrPath | int], named: Mapping[str, StrPath | int | None]
) -> tuple[int | None, Path, Path, Path]:
    """Return rank, host, device and output path from the arguments of `TraceLinker.link`; an integer is the rank."""
    ranks = [value for value in arguments if isinstance(value, int)]
    files = [value for value in arguments if not isinstance(value, int)]
    bound = dict(zip(_LINK_ARGUMENTS, files, strict=False)) | dict(named)
    rank = bound.pop("rank", ranks[0] if ranks else None)
    if (
        set(bound) != set(_LINK_ARGUMENTS)
        or len(files) > len(_LINK_ARGUMENTS)
        or len(ranks) + ("rank" in named) > 1
        or not (rank is None or isinstance(rank, int))
    ):
        raise InvalidValue(
            f"link() got {len(arguments)} arguments and {', '.join(named) or 'no names'}",
            remedy="expected link(rank, chakra_host_trace, chakra_device_trace, output_file); the rank is optional",
        )
    host, device, output = (expand_home(str(bound[name])) for name in _LINK_ARGUMENTS)
    return rank, host, device, output


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_trace_link``: exit status 0; 1 for an error, reported in one line; 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="chakra_trace_link",
        description="Link a Chakra host trace with a device trace (etloom in place of mlcommons/chakra).",
    )
    parser.add_argument("--rank", type=int, help="the rank to read, if the device trace contains several")
    parser.add_argument("--chakra-host-trace", required=True, help="execution trace, JSON")
    parser.add_argument("--chakra-device-trace", required=True, help="Kineto JSON, or an Nsight export")
    parser.add_argument(
        "--output-file", required=True, help="ET+ JSON to write; compressed if its name ends in .gz"
    )
    parser.add_argument("--log-level", default="INFO", help="level of the messages on stderr (default INFO)")
    args = parser.parse_args(arguments)
    level = logging.getLevelName(args.log_level.upper())
    if not isinstance(level, int):
        parser.error(f"unknown log level {args.log_level!r}")
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    files = (args.chakra_host_trace, args.chakra_device_trace, args.output_file)
    return run_command("chakra_trace_link", lambda: TraceLinker().link(*files, rank=args.rank))
