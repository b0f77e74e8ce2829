"""Leaves a daemon thread that trains, and a process that goes on for a while, as a daemon."""

import os
import sys
import threading
from pathlib import Path

from training import describe, train, train_apart


def train_and_stay() -> None:
    train_apart(20)
    trained.set()
    threading.Event().wait()  # not in an operator: torch ends a process whose daemon threads are, with SIGABRT


trained = threading.Event()
train(6)
sys.stdout.flush()
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.setsid()
    if os.fork():
        os._exit(0)
    train(5)
    Path("daemon").write_text("trained")
    os.write(writing, b"x")
    os._exit(0)
os.waitpid(child, 0)
os.read(reading, 1)
threading.Thread(target=train_and_stay, daemon=True).start()
train()
trained.wait()
describe(numbers=False)
