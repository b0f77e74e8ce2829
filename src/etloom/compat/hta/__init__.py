"""The names, arguments and pandas columns of Holistic Trace Analysis (HTA) on top of etloom.

    from etloom.compat.hta import TraceAnalysis, execution_trace

or, without another change of a notebook, ``etloom.compat.hta.install()`` before its imports from ``hta``.

Needs pandas: ``pip install pandas``. docs/coming-from-hta.md lists every figure that
differs from HTA's, and why.
"""

from __future__ import annotations

from etloom.compat.hta import execution_trace
from etloom.compat.hta.analysis import TraceAnalysis
from etloom.compat.hta.call_graph import CallGraph
from etloom.compat.hta.counters import CUDA_SASS_INSTRUCTION_COUNTER_FLOPS, TimeSeriesTypes
from etloom.compat.hta.critical_path import CPEdge, CPEdgeType, CPGraph, CPNode, restore_cpgraph
from etloom.compat.hta.frames import flatten_column_names
from etloom.compat.hta.frames import shorten_kernel_name as shorten_name
from etloom.compat.hta.modules import install
from etloom.compat.hta.timeline import Timeline
from etloom.compat.hta.trace import ParserConfig, Trace
from etloom.compat.hta.trace_diff import DeviceType, LabeledTrace, TraceDiff

__all__ = [
    "CUDA_SASS_INSTRUCTION_COUNTER_FLOPS",
    "CPEdge",
    "CPEdgeType",
    "CPGraph",
    "CPNode",
    "CallGraph",
    "DeviceType",
    "LabeledTrace",
    "ParserConfig",
    "TimeSeriesTypes",
    "Timeline",
    "Trace",
    "TraceAnalysis",
    "TraceDiff",
    "execution_trace",
    "flatten_column_names",
    "install",
    "restore_cpgraph",
    "shorten_name",
]
