"""Threads train; prints what the collector imports meanwhile, and which processes are started: STEPS THREADS [slow]

slow: the job itself imports torch._dynamo, slowly, in each thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Any

steps, thread_count, slow = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["slow"]
PROCESS_STARTS = () if slow else ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")


class Slow:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith(("torch._dynamo", "torch._inductor")) and name.count(".") < 3:
            time.sleep(0.005)


if slow:
    sys.meta_path.insert(0, Slow)  # type: ignore[arg-type]
else:
    import light  # noqa: F401
import torch  # noqa: E402
import torch.nn  # noqa: E402


class Watch:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        frames = [frame.filename for frame in traceback.extract_stack() if "importlib" not in frame.filename]
        # What the hooks of the collector call in turn is imported by them too.
        callers = [file for file in frames if "/etloom/collector/" in file]
        # record_function imports the first once, also in the job's own first step, and a profile with stacks the
        # second. Both import nothing of torch but torch itself, so no two threads can wait for each other there.
        if name in ("torch.profiler._cupti_monitor", "torch.profiler.python_tracer"):
            callers = []
        if callers and not any("/torch/optim/" in file for file in frames[frames.index(callers[-1]) :]):
            print("imported", name, "from", callers[-1])


def train() -> None:
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        with torch.profiler.record_function("part"):
            layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)


sys.meta_path.insert(0, Watch)  # type: ignore[arg-type]
sys.addaudithook(lambda event, words: print(event, words) if event in PROCESS_STARTS else None)
threads = [threading.Thread(target=train) for _ in range(thread_count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
print("finished")
