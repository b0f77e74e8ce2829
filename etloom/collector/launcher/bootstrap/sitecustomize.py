"""Bootstrap of the collector: every Python of a job under `etloom collect` imports it, because it is on PYTHONPATH.

It only waits for the import of torch.optim: when the job itself imports it, the collector is loaded from the folder of
this file, whether or not etloom is installed. It restores sys.path, runs the sitecustomize that it hides, and does not
import torch.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

# Without pathlib, which would be one more import in every Python of the job.
_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
_AWAITED = "torch.optim.optimizer"


def _load_collector(optimizer_module: ModuleType) -> None:
    try:
        import importlib.util

        folder = os.path.dirname(os.path.dirname(_FOLDER))  # noqa: PTH120
        spec = importlib.util.spec_from_file_location(
            "_etloom_collector", f"{folder}/__init__.py", submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["_etloom_collector"] = package
        spec.loader.exec_module(package)
        importlib.import_module("_etloom_collector.launcher.step_hooks").attach(optimizer_module)
    except Exception as error:
        print(f"etloom: nothing is recorded in process {os.getpid()}: {error!r}", file=sys.stderr)


class _Waiter:
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _AWAITED:
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _load_collector(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
if "ETLOOM_COLLECT" in os.environ:
    sys.meta_path.insert(0, _Waiter)

_hidden = PathFinder.find_spec("sitecustomize", sys.path)
if _hidden is None or _hidden.loader is None:
    # As without this file: the module is missing, and `site` ignores exactly this error.
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")

from importlib.util import module_from_spec  # noqa: E402

_module = module_from_spec(_hidden)
sys.modules["sitecustomize"] = _module
_hidden.loader.exec_module(_module)
