"""Changes and removes its current folder, its umask and its limits."""

import os
import resource
from pathlib import Path

from training import describe, train

train(3)
Path("gone").mkdir()
os.chdir("gone")
os.rmdir("../gone")  # noqa: PTH106
os.umask(0o77)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
train()
os.chdir(os.environ["JOB_FOLDER"])
Path("proof").write_text("trained")
print(oct(Path("proof").stat().st_mode), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
describe()
