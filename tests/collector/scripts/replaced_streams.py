"""Has streams and hooks of its own."""

import io
import sys
import threading

from training import describe, train

sys.excepthook = lambda kind, error, trace: print("hooked", kind.__name__, error, flush=True)
threading.excepthook = lambda args: print("thread", args.exc_type.__name__, flush=True)
kept, sys.stderr = sys.stderr, io.StringIO()
train(3)
thread = threading.Thread(target=train, args=("x",))
thread.start()
thread.join()
train()
sys.stderr = kept
describe()
raise RuntimeError("of the job")
