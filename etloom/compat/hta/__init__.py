"""For people who come from Holistic Trace Analysis: its names, arguments and pandas columns over etloom.

    from etloom.compat.hta import TraceAnalysis, execution_trace

Needs pandas: ``pip install "etloom[pandas]"``. Where our numbers differ, ours are meant: docs/coming-from-hta.md says
each difference and why.
"""

from __future__ import annotations

from etloom.compat.hta import execution_trace
from etloom.compat.hta.analysis import TraceAnalysis
from etloom.compat.hta.counters import TimeSeriesTypes
from etloom.compat.hta.trace_diff import DeviceType, LabeledTrace, TraceDiff

__all__ = [
    "DeviceType",
    "LabeledTrace",
    "TimeSeriesTypes",
    "TraceAnalysis",
    "TraceDiff",
    "execution_trace",
]
