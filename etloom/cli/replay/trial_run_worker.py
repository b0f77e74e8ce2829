"""The process that tries a rank's operators for ``etloom replay full``, and may die of one:
``python -m etloom.cli.replay.trial_run_worker JSON``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from etloom.cli.error_handling import handle_errors


@handle_errors()
def work(asked: dict[str, Any]) -> None:
    """One rehearsal; each operator is told before it is tried."""
    import etloom
    from etloom.replayer.compute import isolation
    from etloom.replayer.compute.operator_replay import prepare_executor
    from etloom.replayer.compute.saved_tensors import resources_folder

    told, leave_out = isolation.connect_to_parent()
    trace = etloom.open(asked["path"])[asked["rank"]]
    prepare_executor(
        trace,
        asked["device"],
        namespaces=frozenset(asked["namespaces"]),
        progress=lambda step: told(step.node),
        leave_out=leave_out,
        resources=resources_folder(Path(asked["path"]), trace),
        gpu=asked["gpu"],
    )


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
