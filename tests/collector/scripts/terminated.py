"""Is ended by SIGTERM in its training."""

import os
import signal
import threading

from training import describe, train

train()
describe()
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
train(10**6)
