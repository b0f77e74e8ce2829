"""What if: a recorded job with other times, by its dependency graph.

changes   the language: what to change
edges     which edges of the graph a change is about
engine    the schedule with other lags, as an interval, and what it rests on
retime    the result as a Job, which every other verb takes
"""

from __future__ import annotations

from etloom.simulator.changes import Change, Network, NoStraggler, RemoveSync, parse
from etloom.simulator.engine import Simulated, reasons, simulate, summary
from etloom.simulator.retime import retimed

__all__ = [
    "Change",
    "Network",
    "NoStraggler",
    "RemoveSync",
    "Simulated",
    "parse",
    "reasons",
    "retimed",
    "simulate",
    "summary",
]
