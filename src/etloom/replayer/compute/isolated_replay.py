"""Replays the operators of a trace in a child process, so that a crashing operator does not end this process.

The child is ``python -m etloom.replayer.compute.isolated_replay FOLDER``. The folder holds the recording and the
request; the child writes the result next to them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from etloom import formats
from etloom.core.errors import EtloomError, UnknownName
from etloom.core.trace import Trace
from etloom.formats.parquet import writer
from etloom.replayer.compute import isolation
from etloom.replayer.compute.compute_options import DEVICES, ComputeHooks, ComputeOptions
from etloom.replayer.compute.node_selection import select_nodes
from etloom.replayer.compute.operator_replay import ComputeReplay, replay_operators

_RECORDING, _REPLAY = "recording.parquet", "replay.parquet"
_REQUEST, _RESULT, _COVERAGE, _MESSAGES = "request.json", "result.json", "coverage.parquet", "messages"
_TABLES = ("coverage", "trace")
"""Attributes of ComputeReplay that have a file of their own."""


def replay_isolated(
    trace: Trace, options: ComputeOptions, notify: Callable[[str], None], resources: Path | None = None
) -> ComputeReplay:
    """Replay the operators of a linked trace in a child process; operators that crash it are skipped and reported.

    Args:
        trace: A linked trace with an execution trace.
        options: How the operators are replayed.
        notify: Called with each message at the end of the replay.
        resources: Folder with tensors saved next to the trace.

    Raises:
        EtloomError: The trace has nothing to replay, the device does not exist, or the child process failed.
    """
    if options.device not in DEVICES:
        raise UnknownName("device", options.device, DEVICES, option="device")
    select_nodes(
        trace, options.step, options.subgraph
    )  # a wrong input is reported before the child imports torch
    with tempfile.TemporaryDirectory(prefix="etloom-") as name:
        folder = Path(name)
        writer.write(trace, folder / _RECORDING)
        request = {
            "options": {**asdict(options), "namespaces": sorted(options.namespaces)},
            "resources": None if resources is None else str(resources.resolve()),
        }
        (folder / _REQUEST).write_text(json.dumps(request))
        status, _ = isolation.run_isolated([__name__, name], operator_timeout_s=options.operator_timeout_s)
        if (folder / _MESSAGES).exists():
            for line in (folder / _MESSAGES).read_text(encoding="utf-8").splitlines():
                notify(line)
        if not (folder / _RESULT).exists():
            raise EtloomError(f"the replay ended with status {status} and without a result")
        result = json.loads((folder / _RESULT).read_text())
        if "error" in result:
            raise EtloomError(**result["error"])
        replayed = formats.read(folder / _REPLAY) if (folder / _REPLAY).exists() else None
        assert replayed is None or isinstance(replayed, Trace)
        return ComputeReplay(
            coverage=pl.read_parquet(folder / _COVERAGE, glob=False, hive_partitioning=False),
            trace=replayed,
            **result["replay"],
        )


def run_request(folder: Path) -> None:
    """In the child process: replay the recording in ``folder``, and write the result or the error into that folder."""
    report, skip = isolation.connect_to_parent()
    request = json.loads((folder / _REQUEST).read_text())
    options = {**request["options"], "namespaces": frozenset(request["options"]["namespaces"])}
    resources = request["resources"]
    with (folder / _MESSAGES).open("w", encoding="utf-8") as messages:
        hooks = ComputeHooks(
            on_step=lambda step: report(step.node),
            on_all_tried=lambda: report(None),
            notify=lambda line: messages.writelines((line, "\n")),
        )
        recording = formats.read(folder / _RECORDING)
        assert isinstance(recording, Trace)
        result: dict[str, Any]
        try:
            replay = replay_operators(
                recording,
                ComputeOptions(**options),
                hooks,
                skip=skip,
                resources=None if resources is None else Path(resources),
            )
        except EtloomError as error:
            facts = {name: getattr(error, name) for name in ("what", "where", "remedy", "option")}
            result = {"error": facts}
        else:
            replay.coverage.write_parquet(folder / _COVERAGE)
            if replay.trace is not None:
                writer.write(replay.trace, folder / _REPLAY)
            values = {name: value for name, value in vars(replay).items() if name not in _TABLES}
            result = {"replay": {**values, "unused_tensors": dict(replay.unused_tensors)}}
    (folder / _RESULT).write_text(json.dumps(result))


if __name__ == "__main__":
    run_request(Path(sys.argv[1]))
