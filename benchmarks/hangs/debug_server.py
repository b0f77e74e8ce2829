"""Hangs of gloo jobs under torch.distributed's debug server: is the right rank named, with its line of Python?

    python benchmarks/hangs/debug_server.py --jobs 100    # needs jinja2, tabulate, aiohttp, and Linux

Four forked workers train a toy step. At a random step a random rank does not arrive: it sleeps, loops, waits for a lock
or for a batch, saves a checkpoint to a file that does not answer, calls another collective, or is stopped by a signal.
The answer is right if it names this rank alone and its line; the line of a stopped rank is unknown, since its server is
stopped, too.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import io
import os
import queue
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server

import etloom

RANKS = 4
INTERVAL_S = 2.0


def sleep() -> None:
    time.sleep(600)  # FAULT


def spin() -> None:
    while True:  # FAULT
        pass  # FAULT


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # FAULT


def wait_for_batch() -> None:
    batches: queue.Queue[int] = queue.Queue()
    batches.get()  # FAULT


class SlowStorage(io.BytesIO):
    """A file whose writes do not return."""

    def write(self, content: object) -> int:
        time.sleep(600)  # FAULT
        return 0


def save_checkpoint() -> None:
    torch.save(torch.ones(10), SlowStorage())


def call_another_collective() -> None:
    dist.broadcast(torch.ones(3), src=int(os.environ["RANK"]))  # FAULT


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # FAULT


FAULTS: tuple[Callable[[], None], ...] = (
    sleep,
    spin,
    wait_for_lock,
    wait_for_batch,
    save_checkpoint,
    call_another_collective,
    stop,
)


def list_fault_lines(fault: Callable[[], None]) -> set[str]:
    source = SlowStorage.write if fault is save_checkpoint else fault
    lines, first = inspect.getsourcelines(source)
    return {
        f"{source.__name__} ({__file__}:{first + place})"
        for place, text in enumerate(lines)
        if "# FAULT" in text
    }


def train(rank: int, fault: Callable[[], None] | None, victim: int, step: int) -> None:
    for number in range(step + 3):
        gradient = torch.ones(64) * rank
        if fault is not None and rank == victim and number == step:
            fault()
        dist.all_reduce(gradient)
        if number % 3 == 2:
            dist.barrier()
        time.sleep(0.01)


def run_worker(rank: int, port: int, folder: Path, job: tuple[Callable[[], None] | None, int, int]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    os.dup2(os.open(folder / f"log_{rank}", os.O_WRONLY | os.O_CREAT), 2)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    start_debug_server(
        port=find_port(),
        dump_dir=str(folder),
        dump_interval=INTERVAL_S,
        enabled_dumps={"stacks"},
        fetch_timeout=2.0,
    )
    train(rank, *job)


def find_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def run_job(job: tuple[Callable[[], None] | None, int, int], folder: Path, files: int) -> None:
    """Run a job until the debug server has written ``files`` files of stacks, or it has ended."""
    port, workers = find_port(), []
    for rank in range(RANKS):
        if (pid := os.fork()) == 0:
            try:
                os.setsid()
                run_worker(rank, port, folder, job)
            finally:
                os._exit(0)
        workers.append(pid)
    deadline = time.monotonic() + 120
    running = set(workers)
    while running and time.monotonic() < deadline and len(list(folder.glob("stacks_*"))) < files:
        time.sleep(0.2)
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
    time.sleep(0.5)
    for pid in workers:
        try:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def judge(
    report: etloom.HangReport, fault: Callable[[], None], victim: int, folder: Path
) -> tuple[bool, bool]:
    """Return whether the rank is right, and whether a line of the fault is named."""
    cause = report.cause
    text = "" if cause is None else cause.sentence + " ".join(cause.evidence["evidence"])
    return cause is not None and cause.ranks == (victim,), any(
        line in text for line in list_fault_lines(fault)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if missing := [name for name in ("jinja2", "tabulate", "aiohttp") if find_spec(name) is None]:
        print(f"debug server: not run; pip install {' '.join(missing)}")
        return
    rng = random.Random(options.seed)
    results: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for number in range(options.jobs):
        fault, victim, step = FAULTS[number % len(FAULTS)], rng.randrange(RANKS), rng.randrange(1, 9)
        with tempfile.TemporaryDirectory() as name:
            run_job((fault, victim, step), Path(name), files=4)
            counts = results[fault.__name__]
            counts["jobs"] += 1
            try:
                report = etloom.hangs(name)
            except etloom.EtloomError as error:
                logs = "".join(path.read_text()[-300:] for path in Path(name).glob("log_*"))
                print(f"{fault.__name__}: {error}: {logs}", file=sys.stderr)
                continue
            rank, line = judge(report, fault, victim, Path(name))
            counts["rank"] += rank
            counts["line"] += rank and line
            if not (rank and line):
                print(
                    f"{fault.__name__}, rank {victim}: {re.sub(name, '', report.sentence)}", file=sys.stderr
                )
    total = sum(results.values(), collections.Counter())
    for kind, counts in (*results.items(), ("all", total)):
        print(
            f"{kind:24} {counts['jobs']:4} jobs, right rank {counts['rank']:4}, and line {counts['line']:4}"
        )


if __name__ == "__main__":
    main()
