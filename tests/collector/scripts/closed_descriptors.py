"""Closes all descriptors, as a daemon does, and opens files of its own under the same numbers."""

import os
from pathlib import Path

from training import STEPS, train

train(6)
os.closerange(3, 256)
files = [Path(f"own_{number}").open("w+b", buffering=0) for number in range(12)]  # noqa: SIM115
for file in files:
    file.write(b"text of the job")
for _ in range(STEPS):
    train(1)
    for file in files:
        file.seek(0)
        assert file.read() == b"text of the job"
train(400, 0)  # more than one chunk of the native observer
print("sizes", {file.name: os.fstat(file.fileno()).st_size for file in files})
