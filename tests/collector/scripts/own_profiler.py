"""Profiles some steps itself."""

import torch
from training import describe, train

train(5)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    torch.ones(7) + 1
print("operators", [event.key for event in profiler.key_averages()].count("aten::add"))
train()
schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profiler:
    for _ in range(5):
        train(1)
        profiler.step()
train()
describe()
