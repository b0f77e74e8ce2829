"""Profiles in a child of fork, which the parent does not."""

import os
import sys

import torch
from training import describe, train

train()
child = os.fork()
if not child:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(7) + 1
    os._exit([event.key for event in profiler.key_averages()].count("aten::add"))
print("operators", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.stdout.flush()
train()
describe()
