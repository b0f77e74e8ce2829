"""What the scripts next to this one share: steps of training, and a description of the process.

Each script does one thing that jobs do, in the middle of some training, and prints what it sees. Its output must not
depend on time or on the collector: test_scripts.py runs each alone and under `etloom collect` and compares.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings

import light  # noqa: F401
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)

STEPS = 14
_OURS = ("PYTHONPATH", "ETLOOM_COLLECT", "TORCH_FR_BUFFER_SIZE")
_trainer: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = []


def train(steps: int = STEPS, pause_s: float = 0.01) -> None:
    """Train a small layer, the same one in every call, as a job with a data loader: with some waiting."""
    if not _trainer:
        layer = torch.nn.Linear(8, 8)
        _trainer.append((layer, torch.optim.SGD(layer.parameters(), lr=0.1)))
    layer, optimizer = _trainer[0]
    for _ in range(steps):
        layer(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause_s)


def train_apart(steps: int) -> None:
    """Train a layer that no other thread uses: torch crashes if two threads train one, also across a fork."""
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def environment() -> dict[str, str]:
    """Return the environment without what the collector adds."""
    return {name: value for name, value in sorted(os.environ.items()) if name not in _OURS}


def open_descriptors() -> list[str]:
    """Return what the descriptors of this process refer to, without the files of the collector."""
    targets = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # that of the listing
        if not any(part in target for part in (".etloom-", "/run/traces", "/etloom/collector/")):
            targets.append(
                f"{name} {target.partition('[')[0]}" if int(name) < 3 else target.partition("[")[0]
            )
    return sorted(targets)


def describe(*, numbers: bool = True) -> None:
    """Print what a library could leave changed in a process; `numbers`: also those that the training has come to."""
    handlers = {number.name: signal.getsignal(number) for number in signal.Signals}
    print("handlers", {name: getattr(handler, "__name__", handler) for name, handler in handlers.items()})
    print(
        "mask", signal.pthread_sigmask(signal.SIG_BLOCK, []), "timer", signal.getitimer(signal.ITIMER_REAL)[1]
    )
    names = [thread.name for thread in threading.enumerate()]
    print("threads", sorted(name for name in names if not name.startswith("etloom-")))
    print("descriptors", open_descriptors())
    print("environment", environment())
    print("folder", os.getcwd() == os.environ.get("JOB_FOLDER"), "umask", os.umask(0o22))  # noqa: PTH109
    profile = sys.getprofile()
    if type(profile).__name__ == "TraceContext":  # torch.profiler's, while a window records Python frames
        profile = None
    print("hooks", sys.gettrace(), profile, threading.gettrace(), sys.excepthook is sys.__excepthook__)
    print("gc", len(gc.callbacks), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0)
    print("logging", logging.root.level, logging.root.handlers, "warnings", len(warnings.filters))
    print("modes", torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype())
    print("limits", sys.getrecursionlimit(), sys.getswitchinterval(), len(sys.meta_path))
    if numbers:
        print("random", random.random(), float(torch.rand(1)))
        print("weights", float(_trainer[0][0].weight.detach().double().sum()))
    sys.stdout.flush()
