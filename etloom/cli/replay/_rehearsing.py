"""The process that tries a rank's operators for ``etloom replay full``, and may die of one:
``python -m etloom.cli.replay._rehearsing JSON``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from etloom.cli._guard import guarded


@guarded()
def work(asked: dict[str, Any]) -> None:
    """One rehearsal; each operator is told before it is tried."""
    import etloom
    from etloom.replayer import apart
    from etloom.replayer.compute import prepared
    from etloom.replayer.saved import folder_of

    told, leave_out = apart.here()
    trace = etloom.open(asked["path"])[asked["rank"]]
    prepared(
        trace,
        asked["device"],
        namespaces=frozenset(asked["namespaces"]),
        progress=lambda step: told(step.node),
        leave_out=leave_out,
        resources=folder_of(Path(asked["path"]), trace),
        allow_code=asked["allow_code"],
        gpu=asked["gpu"],
    )


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
