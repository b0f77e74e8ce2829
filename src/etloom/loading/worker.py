"""Worker process of `engines.run_in_processes`: calls a function of etloom with each line of stdin."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from functools import partial

from etloom.core.machine import run_in_query_thread
from etloom.loading.engines import ANSWER


def serve(module: str, name: str) -> None:
    """Call the function ``name`` of a module with each line of stdin, and answer each with `ANSWER`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would handle it at the end of a task
    run_in_query_thread(partial(_serve, module, name))


def _serve(module: str, name: str) -> None:
    function = getattr(importlib.import_module(module), name)
    gc.freeze()  # the modules stay: garbage collections need not go through them
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    for line in sys.stdin:
        function(line)
        os.write(answers, ANSWER.encode())
