"""Spares scripts of the tests what takes longer to import than torch itself: `import light`, or python light.py SCRIPT

Optimizers import torch._dynamo, and torch.profiler looks into torch._inductor's configuration. Nothing of these scripts
is compiled, so a stand-in for what they ask of both will do.
"""

from __future__ import annotations

import os
import runpy
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
torch._dynamo.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # torch.distributed's wish
_config = _stand_in("_inductor.config", triton=SimpleNamespace(cudagraphs=False))
torch._inductor = _stand_in("_inductor", config=_config)

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
    runpy.run_path(sys.argv[0], run_name="__main__")
