"""etloom weaves the execution traces of machine-learning jobs.

Collect them inside a PyTorch job, read every format the field uses, link host operators to device work, analyse,
query, report and export. The public names are those of `etloom.api`; they are imported when first used, so that
``import etloom`` costs nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["EtloomError", "Job", "Trace", "analyze", "export", "link", "open", "query", "read", "record", "report"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'etloom' has no attribute {name!r}")
    from etloom import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
