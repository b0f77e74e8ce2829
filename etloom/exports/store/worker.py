"""The process that prepares one batch of ranks, which it reads from stdin as JSON text."""

from __future__ import annotations

import gc
import sys

from etloom.exports.store.batches import prepare_batch

if __name__ == "__main__":
    gc.freeze()  # the modules stay: garbage collections need not go through them
    prepare_batch(sys.stdin.read())
