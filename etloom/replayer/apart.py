"""Work in a process of its own that may die of what it runs: it is started again without that.

Kernels of torch do not look at all of their arguments; what a trace makes up, or a stranger wrote, can end the process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from etloom.errors import EtloomError

MOST_DEATHS = 50
_FOLDER = "ETLOOM_REPLAY_APART"


def run(command: Sequence[str], quiet: bool = False) -> tuple[int, dict[int, str]]:
    """Run ``python -m`` and the command until it ends by itself; its exit status, and the nodes that it had to leave
    out with the reason.

    Each time a signal ends it, the node that it `told` last is left out from then on. quiet: what it writes is thrown
    away. Raises EtloomError where it told none, or that often that it is no use.
    """
    left_out: dict[int, str] = {}
    with tempfile.TemporaryDirectory(prefix="etloom-") as folder:
        while True:
            at = Path(folder, "at")
            at.unlink(missing_ok=True)
            Path(folder, "left_out").write_text(json.dumps(left_out))
            # Not the user's folder: python -m would import what lies in it.
            started = subprocess.Popen(
                [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-m", *command],
                env={**os.environ, _FOLDER: folder, "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.DEVNULL if quiet else None,
                stderr=subprocess.DEVNULL if quiet else None,
            )
            try:
                status = started.wait()
            except BaseException:
                started.kill()
                started.wait()
                raise
            if status >= 0:
                return status, left_out
            name = signal.Signals(-status).name
            node = at.read_text().strip() if at.exists() else ""
            if not node or int(node) in left_out or len(left_out) == MOST_DEATHS:
                raise EtloomError(
                    f"the replay was ended by {name}", remedy="less memory (--max-memory), or --device meta"
                )
            left_out[int(node)] = f"it ended the process: {name}"


def here() -> tuple[Callable[[int], None], Mapping[int, str]]:
    """In the process: what to call with a node before it is tried, and the nodes to leave out with the reason."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return lambda node: None, {}
    told = os.open(Path(folder, "at"), os.O_CREAT | os.O_WRONLY, 0o600)
    left_out = json.loads(Path(folder, "left_out").read_text())
    return lambda node: _write(told, node), {int(node): why for node, why in left_out.items()}


def _write(told: int, node: int) -> None:
    os.pwrite(told, f"{node:<20}".encode(), 0)
