"""Has handlers of the exit, which train and fork, and a thread that Python waits for."""

import atexit
import os
import sys
import threading
import time

from training import describe, train


def first() -> None:
    print("registered before the training")
    child = os.fork()
    if not child:
        os._exit(0)
    print("child", os.waitpid(child, 0)[1], flush=True)


def last() -> None:
    train(2)
    print("registered after the training", flush=True)


def late() -> None:
    time.sleep(0.2)
    train(2)
    print("late thread", flush=True)


atexit.register(first)
train()
atexit.register(last)
threading.Thread(target=late).start()
describe()
sys.exit(2)
