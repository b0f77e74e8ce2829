"""Leaves by os._exit."""

import os

from training import describe, train

train()
describe()
os._exit(9)
