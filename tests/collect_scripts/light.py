"""Imported first by scripts of the tests: spares them what takes longer to import than torch itself.

Optimizers import torch._dynamo, and torch.profiler looks into torch._inductor's configuration. Nothing of them is
compiled, so a stand-in for what they ask of both will do.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _as_it_is


def _stand_in(name: str, **members: Any) -> Any:
    module = ModuleType(f"torch.{name}")
    module.__dict__.update(members)
    sys.modules[module.__name__] = module
    return module


torch._dynamo = _stand_in("_dynamo", disable=_as_it_is, graph_break=_as_it_is)
_config = _stand_in("_inductor.config", triton=SimpleNamespace(cudagraphs=False))
torch._inductor = _stand_in("_inductor", config=_config)
