"""Replaces itself by another program."""

import os
import sys

from training import describe, train

train()
describe()
os.execv(sys.executable, [sys.executable, "-c", "print('replaced'); raise SystemExit(8)"])
