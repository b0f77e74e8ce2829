"""What if: a recorded job with other times, by its dependency graph.

changes   the language: what to change
edges     which edges of the graph a change is about
engine    the schedule with other lags, as an interval, and what it rests on
retime    the result as a Job, which every other verb takes
"""

from __future__ import annotations

from etloom.simulator.changes import Change, Network, NoStraggler, RemoveSync, parse_change
from etloom.simulator.engine import Simulated, explain_simulation, simulate, summarize_simulation
from etloom.simulator.retiming import retime_job

__all__ = [
    "Change",
    "Network",
    "NoStraggler",
    "RemoveSync",
    "Simulated",
    "parse_change",
    "explain_simulation",
    "retime_job",
    "simulate",
    "summarize_simulation",
]
