"""Predicts the times of a recorded job under changes (what-if), by its dependency graph.

changes          the language: what to change
edge_selection   the edges of the graph that a change is about
engine           the times with other lags, as an interval
summary_table    the figures of a prediction
reasons          what a prediction depends on
retiming         the prediction as a Job, which every verb takes
"""

from __future__ import annotations

from etloom.simulator.changes import Change, Network, NoStraggler, RemoveSync, parse_change
from etloom.simulator.engine import Simulated, simulate
from etloom.simulator.retiming import retime_job

__all__ = [
    "Change",
    "Network",
    "NoStraggler",
    "RemoveSync",
    "Simulated",
    "parse_change",
    "retime_job",
    "simulate",
]
