"""The names, arguments and pandas columns of Holistic Trace Analysis (HTA) on top of etloom.

    from etloom.compat.hta import TraceAnalysis, execution_trace

Needs pandas: ``pip install "etloom[pandas]"``. docs/coming-from-hta.md lists every figure that
differs from HTA's, and why.
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
