"""Runs scripts in forks of a process that has imported torch, which saves most of the time of a short run.

Reads one JSON object a line from stdin: `words` (script and arguments), `environment`, `folder`, `timeout_s`,
`ends_early` (leave out the end of the interpreter after the functions of atexit). Answers with the exit status,
negative for a signal, or null if the script was still running.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import light  # noqa: F401
import torch  # noqa: F401


def wait(child: int, timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def become(request: dict[str, Any]) -> None:
    """Turn this child of fork into a process like one that was just started."""
    os.setpgid(0, 0)
    os.chdir(request["folder"])
    for stream, name in enumerate((os.devnull, "../stdout", "../stderr")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = list(request["words"])
    sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
    sys.orig_argv = [sys.executable, *sys.argv]
    if "ETLOOM_COLLECT" in os.environ:
        attach(os.environ["PYTHONPATH"].partition(os.pathsep)[0])


def attach(folder: str) -> None:
    """Load the collector as its bootstrap does it while a job imports torch."""
    spec = importlib.util.spec_from_file_location("bootstrap", f"{folder}/sitecustomize.py")
    assert spec is not None and spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    with suppress(ModuleNotFoundError):  # of another sitecustomize
        spec.loader.exec_module(bootstrap)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, bootstrap._Waiter)]
    bootstrap._load_collector(sys.modules["torch.optim.optimizer"])


def next_request() -> dict[str, Any] | None:
    """Serve requests; return in each child with the one that it is to answer, and in the server at the end."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        start = time.monotonic()
        child = os.fork()
        if not child:
            become(request)
            return dict(request)
        status = wait(child, request["timeout_s"])
        print(json.dumps({"status": status, "seconds": time.monotonic() - start}), flush=True)
    return None


gc.collect()
gc.freeze()  # a collection in a child would copy the pages of all objects of torch
request = next_request()
if request is not None:
    runpy.run_path(sys.argv[0], run_name="__main__")
    if request["ends_early"]:
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(0)
