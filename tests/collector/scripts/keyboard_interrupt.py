"""Is interrupted in its training, twice."""

import os
import signal
import threading
import time

from training import describe, train


def interrupt_soon() -> None:
    threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()


signal.signal(signal.SIGINT, signal.default_int_handler)
train(5)
try:
    interrupt_soon()
    train(10**6)
except KeyboardInterrupt:
    print("interrupted")
describe(numbers=False)
train(5)
interrupt_soon()
time.sleep(60)  # not in the training: the last line of the traceback must not depend on time
