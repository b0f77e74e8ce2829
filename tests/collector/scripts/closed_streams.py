"""Closes stdout and stderr."""

import os
import sys
from pathlib import Path

from training import train

train(4)
sys.stderr.close()
os.close(2)
train()
os.close(1)
Path("proof").write_text("trained")
os._exit(0)
