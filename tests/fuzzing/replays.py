"""Fuzz both replays: ``python -m fuzzing.replays --inputs 1000`` (with ``tests`` on PYTHONPATH); ``make fuzz-replays``.

Each input is a run of one rank with a hostile trace. A process forked from one that has loaded torch reads and replays it,
like the child of ``etloom replay compute``, or like one rank of ``etloom replay comms``. It must end by itself, with an
answer or one line, within `SECONDS` of CPU time (four times that in all) and `BYTES` more than torch itself, and leave no
process. A signal that ends it while an operator runs is not a fault: the parent of that child then skips the operator.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzzing.hostile_replays import hostile_calls, hostile_operators
from support.processes import free_port

SECONDS, BYTES = 10, 2 << 30
_STATUSES = {0, 1, 2, 3}
_REQUEST = {"device": "cpu", "rank": None, "step": None, "subgraph": None, "namespaces": ["aten"], "repeats": 1, "warmup": 0,
            "max_bytes": 1 << 30, "threads": 1, "min_coverage": 0, "out": None, "format": "json"}  # fmt: skip


def run_input(seed: int, number: int, folder: Path) -> tuple[str, str | None]:
    """Replay an input in a fork of this process; return how it ended, and its fault or None."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.choice(("compute", "compute", "comms", "comms dry run"))
    document = hostile_operators(rng) if kind == "compute" else hostile_calls(rng)
    run, channel = folder / "run", folder / "channel"
    for place in (run, channel):
        place.mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    (run / "torch_et_0.json").write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))
    sys.setrecursionlimit(limit)
    (channel / "skipped").write_text("{}")
    child = os.fork()
    if not child:
        _replay(kind, run, channel)
    status = _wait(child)
    error = (folder / "stderr").read_text(errors="replace").strip()
    return kind, _find_fault(kind, status, error, _left_behind(child), channel / "node")


def _find_fault(kind: str, status: int | None, error: str, is_left: bool, node: Path) -> str | None:
    tried = node.read_text().split() if node.exists() else []
    if is_left:
        return "left a process"
    if kind == "compute" and len(tried) == 1 and (status is None or status < 0):
        return None  # in an operator, which the parent skips
    if status not in _STATUSES:
        return f"ended with {status}: {error[-300:]}" if status is not None else f"more than {SECONDS} s"
    if status and not error:
        return f"exit status {status} without a message"
    return f"a traceback: {error[-500:]}" if "Traceback" in error else None


def _replay(kind: str, run: Path, channel: Path) -> None:
    """Replay in this process, which becomes the leader of a group and is limited."""
    os.setpgid(0, 0)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(run.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    os.environ |= {"ETLOOM_REPLAY_CHANNEL": str(channel), "ETLOOM_CACHE": str(run.parent / "cache")}
    status = 70
    try:
        if kind == "compute":
            from etloom.cli.replay.compute_worker import work

            work({**_REQUEST, "path": str(run), "deadline": time.monotonic() + SECONDS})
            status = 0
        else:
            from etloom import cli

            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
            more = (
                ["--dry-run"]
                if kind == "comms dry run"
                else ["--timeout", "5", "--master-port", str(free_port())]
            )
            status = cli.main(["replay", "comms", str(run), *more])
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int) -> int | None:
    """Return the exit status; None if the child took too long."""
    deadline = time.monotonic() + 4 * SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _left_behind(child: int) -> bool:
    """Return whether a process of the child's group is left, and end it."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def run_inputs(seed: int, first: int, count: int, seconds: float) -> int:
    """Run inputs and print their faults; return the number of these."""
    import torch

    import etloom.api
    import etloom.cli.replay.comms
    import etloom.cli.replay.compute_worker
    import etloom.replayer.comms.runner
    import etloom.replayer.compute.executor  # noqa: F401

    torch.set_num_threads(1)
    kinds, faults, deadline = Counter[str](), 0, time.monotonic() + seconds
    for number in range(first, first + count):
        if time.monotonic() > deadline:
            break
        with tempfile.TemporaryDirectory(prefix="etloom-fuzz-") as folder:
            kind, fault = run_input(seed, number, Path(folder))
        kinds[kind] += 1
        if fault:
            faults += 1
            print(f"{kind}, --seed {seed} --first {number} --inputs 1: {fault}", flush=True)
    print(", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) + f"; {faults} with a fault")
    return faults


def main(words: list[str] | None = None) -> int:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    args = parser.parse_args(words)
    return run_inputs(args.seed, args.first, args.inputs, args.seconds) > 0


if __name__ == "__main__":
    sys.exit(main())
