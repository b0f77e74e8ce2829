"""The trace linker of mlcommons/chakra under its own names: `TraceLinker` and the command ``chakra_trace_link``.

The output is ET+ as `etloom.exports.etplus` writes it: the peer's names of members, readable by chakra_converter. The
intended differences in flags, links and the file are listed in docs/coming-from-chakra.md. In short:

- Traces of different programs are refused (LinkError) instead of paired by ids that agree by chance.
- Traces without ProfilerStep, on the CPU alone, gzipped, from ROCm, under relative paths are linked.
- Host nodes keep their ids; device nodes come after them, memsets too, with their own attributes.
- ``inter_thread_dep`` names an operator that had ended; ``sync_dep`` is filled on every step.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from os import PathLike

from etloom import formats
from etloom.api import export
from etloom.compat._command import run_command
from etloom.linker import link
from etloom.linker.merging import select_rank

_log = logging.getLogger("etloom.compat.chakra")


class TraceLinker:
    """Links a host execution trace with a device trace of one rank."""

    def link(
        self,
        chakra_host_trace: str | PathLike[str],
        chakra_device_trace: str | PathLike[str],
        output_file: str | PathLike[str],
        rank: int | None = None,
    ) -> None:
        """Write the ET+ of the two traces to ``output_file``. Raises ReadError, LinkError, EtloomError.

        rank: which of several ranks of a device trace (Nsight), or the rank that both are of.
        """
        host, device = (
            select_rank(formats.read(path), rank, path) for path in (chakra_host_trace, chakra_device_trace)
        )
        linked = link(host, device)
        for name, severity, count, example in linked.stats.rows():
            if name.startswith("link.") or severity != "info":
                level = logging.INFO if severity == "info" else logging.WARNING
                _log.log(level, "%s: %d (%s)", name, count, example)
        _log.info("linked: %s", linked.meta.get("link"))
        export(linked, output_file, "etplus")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_trace_link``: exit status 0; 1 for an error, reported in one line; 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="chakra_trace_link",
        description="Link a Chakra host trace with a device trace (etloom in place of mlcommons/chakra).",
    )
    parser.add_argument("--rank", type=int, help="the rank: which one of a device trace that holds several")
    parser.add_argument("--chakra-host-trace", required=True, help="execution trace, JSON")
    parser.add_argument("--chakra-device-trace", required=True, help="Kineto JSON, or an Nsight export")
    parser.add_argument("--output-file", required=True, help="ET+ JSON to write; packed where it ends in .gz")
    parser.add_argument("--log-level", default="INFO", help="of the messages on stderr (default INFO)")
    args = parser.parse_args(arguments)
    level = logging.getLevelName(args.log_level.upper())
    if not isinstance(level, int):
        parser.error(f"unknown log level {args.log_level!r}")
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    files = (args.chakra_host_trace, args.chakra_device_trace, args.output_file)
    return run_command("chakra_trace_link", lambda: TraceLinker().link(*files, args.rank))
