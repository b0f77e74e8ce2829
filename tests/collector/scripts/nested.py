"""Starts itself twice: a launcher of a launcher of a job."""

import os
import subprocess
import sys

depth = int(os.environ.get("DEPTH", "0"))
if depth < 2:
    environment = {**os.environ, "DEPTH": str(depth + 1)}
    print("level", depth, flush=True)
    sys.exit(subprocess.run([sys.executable, __file__], env=environment, check=False).returncode + depth + 1)
else:
    from training import describe, train

    train()
    describe()
    sys.exit(4)
