"""Traces and profiles its own Python code."""

import sys
import threading

from training import describe, train


def trace(frame: object, event: str, argument: object) -> object:
    events.add(event)
    return trace


def profile(frame: object, event: str, argument: object) -> None:
    calls.add(event)


events: set[str] = set()
calls: set[str] = set()
train(5)
sys.settrace(trace)
train(8)
sys.settrace(None)
threading.settrace(trace)
thread = threading.Thread(target=train, args=(2,))
thread.start()
thread.join()
threading.settrace(None)
sys.setprofile(profile)
train(8)
print("kept", sys.getprofile() is profile)
sys.setprofile(None)
print(sorted(events), {"call", "return"} <= calls)
describe()
