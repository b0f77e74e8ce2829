"""Execution traces of machine-learning jobs: collect, read, link, analyze, report, export, simulate and replay.

The public names are imported when they are first used, so that ``import etloom`` costs nothing and `record` adds
nothing but torch to a training job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etloom.core.version import __version__ as __version__

if TYPE_CHECKING:
    from etloom.api import (
        analyze,
        check,
        collect,
        compare,
        convert,
        diff,
        diff_memory,
        export,
        gather,
        graph,
        hangs,
        info,
        link,
        lint,
        metrics,
        open,
        plan,
        plot,
        predict,
        query,
        read,
        replay,
        report,
        repro,
        salvage,
        select,
        show,
        simulate,
        simulate_memory,
        store_add,
        store_list,
        store_refresh,
        store_stragglers,
    )
    from etloom.collector import record
    from etloom.core.errors import EtloomError, EtloomWarning
    from etloom.core.trace import Job, Trace

__all__ = [
    "EtloomError",
    "EtloomWarning",
    "Job",
    "Trace",
    "analyze",
    "check",
    "collect",
    "compare",
    "convert",
    "diff",
    "diff_memory",
    "export",
    "gather",
    "graph",
    "hangs",
    "info",
    "link",
    "lint",
    "metrics",
    "open",
    "plan",
    "plot",
    "predict",
    "query",
    "read",
    "record",
    "replay",
    "report",
    "repro",
    "salvage",
    "select",
    "show",
    "simulate",
    "simulate_memory",
    "store_add",
    "store_list",
    "store_refresh",
    "store_stragglers",
]

_HOME = {
    "EtloomError": "core.errors",
    "EtloomWarning": "core.errors",
    "Job": "core.trace",
    "Trace": "core.trace",
    "record": "collector",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'etloom' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"etloom.{_HOME.get(name, 'api')}"), name)
    except ImportError:
        from etloom.core.native_part import check_native_part

        check_native_part()
        raise


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic ``%%etloom``; IPython calls it for ``%load_ext etloom``."""
    from etloom.compat.ipython import register

    register(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
