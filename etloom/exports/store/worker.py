"""Worker process: reads the description of a batch of ranks (JSON) from stdin, and calls `prepare_batch` with it."""

from __future__ import annotations

import gc
import signal
import sys
from functools import partial

from etloom.core.machine import run_in_query_thread
from etloom.exports.store.batches import prepare_batch

if __name__ == "__main__":
    gc.freeze()  # the modules stay: garbage collections need not go through them
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would handle it when the batch is complete
    run_in_query_thread(partial(prepare_batch, sys.stdin.read()))
