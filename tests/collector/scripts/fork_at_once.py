"""Forks right after it has created its first layer; the child ends as Python does."""

import os
import sys

import torch
from training import describe, train

layer = torch.nn.Linear(2, 2)
child = os.fork()
if not child:
    sys.exit(3)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
train()
describe()
