"""Predicts a job on more or fewer ranks than recorded: each new rank repeats the program of a recorded rank.

layout        which recorded rank each new rank repeats
replication   the graph and the communications of the new ranks
jitter        arrivals of new ranks, drawn from the recorded distribution
sharding      kernels and messages of another size of tensor, context or expert parallelism
traces        the traces of the new ranks, for exports and analyses
"""

from __future__ import annotations

from etloom.simulator.resizing.layout import parse_parallel, resize
from etloom.simulator.resizing.traces import synthesize_job

__all__ = ["parse_parallel", "resize", "synthesize_job"]
