"""Finds the operators of a trace that crash or hang, by a trial run in a child process.

The child is ``python -m etloom.replayer.compute.trial JSON``; it reports each operator before it is tried.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etloom import formats
from etloom.core.trace import Trace
from etloom.formats.parquet import writer
from etloom.replayer.compute import isolation
from etloom.replayer.compute.compute_options import ComputeHooks, ComputeOptions
from etloom.replayer.compute.operator_replay import prepare_executor


def find_crashing_operators(trace: Trace, options: ComputeOptions, resources: Path | None) -> dict[int, str]:
    """Return node -> reason for the operators of a linked trace that crash their process or do not end in time."""
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        file = Path(folder, "trace.parquet")
        writer.write(trace, file)
        request = {
            "trace": str(file),
            "device": options.device,
            "gpu": options.gpu,
            "namespaces": sorted(options.namespaces),
            "resources": None if resources is None else str(resources),
        }
        _, skipped = isolation.run_isolated([__name__, json.dumps(request)], discard_output=True)
    return skipped


def run_trial(request: Mapping[str, Any]) -> None:
    """In the child process: run each operator of the requested trace once, and report each node before it runs."""
    report, skipped = isolation.connect_to_parent()
    trace = formats.read(request["trace"])
    assert isinstance(trace, Trace)
    resources = request["resources"]
    prepare_executor(
        trace,
        ComputeOptions(request["device"], gpu=request["gpu"], namespaces=frozenset(request["namespaces"])),
        ComputeHooks(on_step=lambda step: report(step.node)),
        skip=skipped,
        resources=None if resources is None else Path(resources),
    )


if __name__ == "__main__":
    run_trial(json.loads(sys.argv[1]))
