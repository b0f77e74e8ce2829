"""Predicts the times of a recorded job under other conditions: changed kernels, network, device, or number of ranks.

What-if (`etloom simulate`) changes recorded times in the dependency graph:

changes          the language: what to change
edge_selection   the edges of the graph that a change is about
changed_lags     the lags of edges after changes
engine           the times with other lags, as an interval
summary_table    the figures of a what-if
reasons          what a what-if depends on
retiming         the changed times as a Job, which every verb takes

Predictions (`etloom predict`) replace recorded times by models, step by step:

prediction       the steps and the answer
scenario         a job under prediction; recording: the first one; durations: its figures
network          topologies, costs of collectives, shared links, the network fitted to a recording
resizing         more or fewer data-parallel replicas
devices          kernels and collectives on another GPU
pipelines        other stages, model chunks and micro-batches
untimed          jobs recorded without times

Plans (`etloom plan`) start from sizes alone:

planning         the search, and the ranked layouts
training_jobs    jobs and clusters in YAML; jobs/: examples
training_shapes  parameters, FLOPs and memory of a model under a layout
training_step    the time of a step, with network/placement
"""

from __future__ import annotations

from etloom.simulator.changes import Change, LikePeers, Network, NoStraggler, RemoveSync, parse_change
from etloom.simulator.engine import Simulated, simulate
from etloom.simulator.retiming import retime_job

__all__ = [
    "Change",
    "LikePeers",
    "Network",
    "NoStraggler",
    "RemoveSync",
    "Simulated",
    "parse_change",
    "retime_job",
    "simulate",
]
