"""Registers etloom's front under the import names of HTA, so that no import line of a notebook changes."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

from etloom.core.errors import EtloomError

_NAMES: dict[str, tuple[str, ...]] = {
    "hta": (),
    "hta.trace_analysis": ("TraceAnalysis", "TimeSeriesTypes"),
    "hta.trace_diff": ("TraceDiff", "LabeledTrace", "DeviceType"),
    "hta.common": (),
    "hta.common.execution_trace": (),
    "hta.common.trace": ("Trace",),
    "hta.common.trace_filter": (),
    "hta.common.trace_symbol_table": (),
    "hta.common.trace_call_graph": (),
    "hta.common.timeline": (),
    "hta.analyzers": (),
    "hta.analyzers.timeline": (),
    "hta.analyzers.critical_path_analysis": ("CPGraph", "CPNode", "CPEdge", "CPEdgeType", "restore_cpgraph"),
    "hta.analyzers.trace_counters": ("TimeSeriesTypes", "CUDA_SASS_INSTRUCTION_COUNTER_FLOPS"),
    "hta.configs": (),
    "hta.configs.config": (),
    "hta.configs.parser_config": ("ParserConfig",),
    "hta.utils": (),
    "hta.utils.utils": ("shorten_name", "flatten_column_names"),
}
"""HTA's modules, with the names of `etloom.compat.hta` that they hold."""
_ALIASES = {
    "hta.common.execution_trace": "etloom.compat.hta.execution_trace",
    "hta.common.trace_filter": "etloom.compat.hta.timeline",
    "hta.common.trace_call_graph": "etloom.compat.hta.call_graph",
    "hta.common.timeline": "etloom.compat.hta.timeline",
    "hta.analyzers.timeline": "etloom.compat.hta.timeline",
}
"""HTA's modules that are modules here."""


def install() -> None:
    """Register ``hta`` and its modules, also where HTA is installed; a second call does nothing.

    Call it before the first ``import hta``. Modules of HTA without a counterpart here cannot be imported then.

    Raises:
        EtloomError: HTA itself was imported already.
    """
    front = importlib.import_module("etloom.compat.hta")
    loaded = sys.modules.get("hta")
    if loaded is not None:
        if getattr(loaded, "__file__", None) == front.__file__:
            return
        raise EtloomError(
            "hta is imported already", where=getattr(loaded, "__file__", None), remedy="call install() first"
        )
    for name, members in _NAMES.items():
        module = importlib.import_module(_ALIASES[name]) if name in _ALIASES else ModuleType(name)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        if name not in _ALIASES:
            module.__dict__.update({member: getattr(front, member) for member in members})
            module.__file__, module.__path__ = front.__file__, []
    from etloom.compat.hta.frames import SymbolTable

    for name in ("hta.common.trace_symbol_table", "hta.common.trace"):
        sys.modules[name].__dict__["TraceSymbolTable"] = SymbolTable
    sys.modules["hta.configs.config"].__dict__["logger"] = logging.getLogger("hta")
