"""Empties its environment."""

import os
import subprocess
import sys

from training import describe, train

folder = os.environ["JOB_FOLDER"]
train(3)
os.environ.clear()
os.environ["JOB_FOLDER"] = folder
train()
print(
    subprocess.run(
        [sys.executable, "-c", "print('child')"], capture_output=True, text=True, check=True
    ).stdout
)
describe()
