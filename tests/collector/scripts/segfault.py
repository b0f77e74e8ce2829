"""Crashes."""

import ctypes

from training import describe, train

train()
describe()
ctypes.string_at(0)
