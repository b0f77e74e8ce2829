"""Has Python's fault handler on, with a watchdog, and asks for a dump by a signal."""

import faulthandler
import os
import signal
from pathlib import Path

from training import describe, train

with Path("dump").open("w") as file:
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    faulthandler.dump_traceback_later(60, file=file)
    train()
    faulthandler.cancel_dump_traceback_later()
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.disable()
os.unlink("dump")  # noqa: PTH108
describe()
