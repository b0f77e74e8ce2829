"""Real gloo jobs with real faults, watched as `etloom watch` does: share of faults named, time to it, false alarms.

python benchmarks/hangs/real_jobs.py --faults 28 --healthy 8      ranks are forked from one process that imported torch

Healthy jobs take turns in pausing as jobs do. Each rank has its own network namespace on a bridge, so that its link can
be cut; without root that fault is left out.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KINDS = {
    "stop": {"stopped"},
    "kill": {"crashed"},
    "gil": {"unresponsive"},
    "order": {"other collective", "wait for each other"},
    "size": {"other size"},
    "slow": {"slow"},
    "cut": {"link"},
}
"""Fault -> the kinds that name it."""
PAUSES = ("validation", "checkpoint", "loader")
"""Pauses of healthy jobs, longer than a stall: all ranks compute without communication, one rank saves a checkpoint
while the others wait, all ranks wait for a data loader.
"""
PAUSE_S = 4.0
CLONE_NEWNET = 0x40000000
RANKS = 4
FAULT_STEP = 25
STEP_S = 0.02
MAX_S = 40.0


class Network:
    """A network namespace for each rank, on a bridge."""

    def __init__(self) -> None:
        self.tag = f"hj{os.getpid() % 100_000}"
        self._ip("link", "add", f"b{self.tag}", "type", "bridge")
        self._ip("link", "set", f"b{self.tag}", "up")
        for rank in range(RANKS):
            space, port = f"{self.tag}n{rank}", f"v{self.tag}{rank}"
            self._ip("netns", "add", space)
            self._ip("link", "add", port, "type", "veth", "peer", "name", f"e{rank}", "netns", space)
            self._ip("link", "set", port, "master", f"b{self.tag}", "up")
            self._ip("-n", space, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", f"e{rank}")
            self._ip("-n", space, "link", "set", f"e{rank}", "up")
            self._ip("-n", space, "link", "set", "lo", "up")

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def enter(self, rank: int) -> None:
        """Move this process to the namespace of a rank."""
        with Path(f"/run/netns/{self.tag}n{rank}").open() as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def connect(self, rank: int, connected: bool) -> None:
        """Take the port of a rank from the bridge, or put it back; no end of a connection sees that."""
        words = ("master", f"b{self.tag}") if connected else ("nomaster",)
        self._ip("link", "set", f"v{self.tag}{rank}", *words)

    def close(self) -> None:
        """Delete the namespaces and the bridge."""
        for rank in range(RANKS):
            self._ip("netns", "del", f"{self.tag}n{rank}")
        self._ip("link", "del", f"b{self.tag}")


def train(rank: int, fault: str | None, culprit: int, run: Path, address: tuple[str, int]) -> None:
    """Train on one rank until the end, or until it is killed."""
    import torch
    import torch.distributed as dist

    from etloom.collector.session.live_state import start_live_state

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR=address[0], MASTER_PORT=str(address[1])
    )
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start_live_state(run, sys.modules["torch.optim.optimizer"])
    dist.init_process_group("gloo")
    for step in range(FAULT_STEP + (10_000 if fault in KINDS else 15)):
        model(torch.ones(2, 8)).sum().backward()
        time.sleep(STEP_S)
        is_fault = rank == culprit and step == FAULT_STEP
        if is_fault and fault is not None:
            inject(fault, run)
        if step == FAULT_STEP and fault in PAUSES:
            pause(fault, model, rank == culprit)
        if rank == culprit and fault == "slow" and step > 5:
            time.sleep(10 * STEP_S)
        gradient = torch.ones(1000 if not (is_fault and fault == "size") else 90_000)
        first, second = (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0))
        calls: tuple[Callable[[torch.Tensor], object], ...] = (first, second)
        for call in reversed(calls) if is_fault and fault == "order" else calls:
            call(gradient)
        optimizer.step()
    dist.destroy_process_group()


def pause(kind: str, model: Callable[[torch.Tensor], torch.Tensor], saves: bool) -> None:
    """Do for `PAUSE_S` what healthy jobs do outside of communication."""
    import torch
    from torch.utils.data import DataLoader

    end = time.monotonic() + PAUSE_S
    if kind == "validation":
        while time.monotonic() < end:
            model(torch.ones(2, 8))
            time.sleep(0.001)
    elif kind == "checkpoint" and saves:
        state = {"buffer": torch.empty(16 << 20)}
        while time.monotonic() < end:
            with Path(os.devnull).open("wb") as file:
                torch.save(state, file)
    elif kind == "loader":
        next(iter(DataLoader([0.0], collate_fn=_load_slowly)))  # type: ignore[arg-type]


def _load_slowly(batch: list[float]) -> list[float]:
    time.sleep(PAUSE_S)
    return batch


def inject(fault: str, run: Path) -> None:
    """Stop this rank in one of several ways."""
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "gil":
        ctypes.PyDLL(None).sleep(600)
    elif fault == "cut":
        (run / "cut").touch()
        while (run / "cut").exists():  # until the parent has cut the link
            time.sleep(0.01)


def start_job(fault: str | None, culprit: int, run: Path, network: Network | None) -> list[int]:
    """Fork the ranks and return their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ("127.0.0.1" if network is None else "10.78.0.1", port)
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            status = 0
            log = os.open(run / f"log_{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                if network is not None:
                    network.enter(rank)
                    os.environ["GLOO_SOCKET_IFNAME"] = f"e{rank}"
                train(rank, fault, culprit, run, address)
            except BaseException as error:
                sys.last_value = error  # as Python does before its exit functions
                traceback.print_exc()
                status = 1
            atexit._run_exitfuncs()
            os._exit(status)
        pids.append(pid)
    return pids


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """A folder that a forked process does not delete at its end, as it would a TemporaryDirectory."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def judge_job(fault: str | None, culprit: int, network: Network | None) -> tuple[bool, float, str]:
    """Run a job; return whether it was judged right, seconds from the stall to the answer, and the answer."""
    from etloom.api.watching import JobWatcher

    with new_folder() as run:
        pids = start_job(fault, culprit, run, network)
        watcher = JobWatcher(run)
        answer, delay = "no answer", float("nan")
        right = fault not in KINDS
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < MAX_S:
                reap(pids)
                if network is not None and (run / "cut").exists():
                    network.connect(culprit, False)
                    (run / "cut").unlink()
                seen = watcher.observe()
                if seen is not None and seen.cause is not None:
                    cause = seen.cause
                    answer, delay = f"{cause.kind} {cause.ranks}: {cause.sentence}", seen.stalled_s
                    right = fault in KINDS and cause.kind in KINDS[fault] and cause.ranks == (culprit,)
                    break
                if seen is not None and seen.has_ended:
                    answer = "ended"
                    break
                time.sleep(0.25)
        finally:
            if network is not None:
                network.connect(culprit, True)
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    pass
    return right, delay, answer


def reap(pids: list[int]) -> None:
    """Collect processes that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def main() -> None:
    """Print one line per wrong answer, then the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=28)
    parser.add_argument("--healthy", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    import torch._dynamo  # noqa: F401  which an optimizer imports: once, before the forks

    network = Network() if os.geteuid() == 0 and shutil.which("ip") else None
    kinds = [kind for kind in KINDS if kind != "cut" or network is not None]
    generator = random.Random(options.seed)
    rights: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    delays = []
    healthy = (None, *PAUSES)
    plan: list[str | None] = [kinds[number % len(kinds)] for number in range(options.faults)]
    plan += [healthy[number % len(healthy)] for number in range(options.healthy)]
    for fault in plan:
        right, delay, answer = judge_job(fault, culprit := generator.randrange(RANKS), network)
        counts[str(fault)] += 1
        rights[str(fault)] += right
        delays += [delay] if right and fault in KINDS else []
        if not right:
            print(f"WRONG: {fault} on rank {culprit}: {answer}", flush=True)
    if network is not None:
        network.close()
    for fault, count in counts.items():
        print(f"{fault}: {rights[fault]} of {count} right")
    within = sum(delay <= 5 for delay in delays)
    print(f"{within} of {len(delays)} named within 5 s of the stall; longest {max(delays, default=0):.1f} s")


if __name__ == "__main__":
    main()
