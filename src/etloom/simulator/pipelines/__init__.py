"""Predicts a pipeline with other stages, model chunks or micro-batches from a recorded pipeline's schedule and times.

rank_steps   operations and messages of a rank, from a linked trace or a pipeline operation trace
recognition  the pipelines of a recording
schedules    orders of operations: GPipe, 1F1B, interleaved
timing       start and end of each operation of a schedule
relay        the prediction: times of operations in the new pipeline, from those of the recorded one
"""

from __future__ import annotations

from etloom.simulator.pipelines.relay import PIPELINE_AXES, RelaidPipeline, relay

__all__ = ["PIPELINE_AXES", "RelaidPipeline", "relay"]
