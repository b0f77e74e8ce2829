"""A few steps of training on a linear layer, in which something goes wrong: python tiny.py CASE[+CASE...] [STEPS].

It prints `step N` as each step is done, so that a test sees that the job itself was not disturbed.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path

import light  # noqa: F401
import torch

BREAK = 3  # the step in whose middle things happen


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def fork_and_compute() -> None:
    def compute() -> None:
        for _ in range(300):
            torch.ones(3) + 1

    child = os.fork()
    if not child:
        compute()
        thread = threading.Thread(target=compute)  # the profilers' callbacks are on in every new thread
        thread.start()
        thread.join()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0


def load_with_workers() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
    assert sum(float(batch.sum()) for (batch,) in loader) == 2016.0


def backward_in_a_thread() -> None:
    def work() -> None:
        weight = torch.ones(4, 4, requires_grad=True)
        (weight @ weight).sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def name_badly() -> None:
    with torch.profiler.record_function('a "quoted"\nC:\\name é'):
        torch.ones(2) + 1


def raise_an_error() -> None:
    raise RuntimeError("the job's own error")


def profile_it() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(7) + 1
    assert [event.key for event in own.key_averages()].count("aten::add") == 1


def observe_it() -> None:
    path = os.environ["OWN_ET"]
    own = torch.profiler.ExecutionTraceObserver().register_callback(path)
    own.start()
    torch.ones(7) + 1
    own.stop()
    own.unregister_callback()
    assert '"aten::add"' in Path(path).read_text()


IN_THE_MIDDLE = {
    "raise": raise_an_error,
    "sys_exit": lambda: sys.exit(7),
    "os_exit": lambda: os._exit(9),
    "sigkill": lambda: kill(signal.SIGKILL),
    "sigterm": lambda: kill(signal.SIGTERM),
    "sigint": lambda: kill(signal.SIGINT),
    "fork": fork_and_compute,
    "workers": load_with_workers,
    "thread": backward_in_a_thread,
    "bad_name": name_badly,
    "own_profiler": profile_it,
    "own_observer": observe_it,
}


class Twice(torch.optim.SGD):
    """One step for its caller, and two calls of a hooked step inside."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        return super().step(closure)


def main() -> None:
    cases, steps = sys.argv[1].split("+"), int(sys.argv[2]) if len(sys.argv) > 2 else 6
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 4)
    other = torch.nn.Linear(8, 4)
    if "no_optimizer" in cases:
        print(float(model(torch.ones(8)).sum()) != 0)
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "subclass" in cases:
        optimizer = Twice(model.parameters(), lr=0.1)
    second = torch.optim.Adam(other.parameters()) if "two_optimizers" in cases else None
    if "small_files" in cases:  # stands in for a full disk: every write past 64 KiB of a file fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if "no_folder" in cases:  # as where a disk was unmounted; permissions would not stop root
        shutil.rmtree(os.environ["OUT"])
        Path(os.environ["OUT"]).write_text("not a folder")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if "scaler" in cases else None
    own = None
    if "running_profiler" in cases:
        own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        own.start()
    if "warmed_profiler" in cases:  # prepared in step 0, running from step 5 on
        schedule = torch.profiler.schedule(wait=0, warmup=5, active=1, repeat=1)
        own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)
        own.start()

    for step in range(steps):
        loss = model(torch.ones(2, 8)).square().sum() + other(torch.ones(2, 8)).square().sum()
        for case in cases if step == BREAK else ():
            IN_THE_MIDDLE.get(case, lambda: None)()
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss * (float("inf") if step == BREAK else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        if second is not None:
            second.step()
        if "warmed_profiler" in cases:
            own.step()
        print("step", step, flush=True)
    if own is not None:
        own.stop()
        print("own profiler saw", sum(event.key == "aten::linear" for event in own.key_averages()))
    print("done", flush=True)


if __name__ == "__main__":
    main()
