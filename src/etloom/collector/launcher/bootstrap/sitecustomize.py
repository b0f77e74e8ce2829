"""Bootstrap of the collector: every Python of a job under `etloom collect` imports it, because it is on PYTHONPATH.

It only waits for the imports of torch.optim (with --fake-world of torch) and ray: when the job itself imports them, the
collector is loaded from the folder of this file, whether or not etloom is installed. It restores sys.path, runs the
sitecustomize that it hides, and does not import torch.
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
_FAKE_DEVICE = "ETLOOM_FAKE_DEVICE"  # the variable of collect --fake-world
_fork_hooks: dict[str, Any] = {}  # filled in when the collector is loaded (fork_hold.py)


def _import_from_collector(name: str) -> Any:
    """Import a module of the collector from the folder that contains this file; etloom need not be installed."""
    import importlib.util

    if "_etloom_collector" not in sys.modules:
        folder = os.path.dirname(os.path.dirname(_FOLDER))  # noqa: PTH120
        spec = importlib.util.spec_from_file_location(
            "_etloom_collector", f"{folder}/__init__.py", submodule_search_locations=[folder]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["_etloom_collector"] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"_etloom_collector.{name}")


def _load_collector(optimizer_module: ModuleType) -> None:
    try:
        _import_from_collector("fork_hold").register(_fork_hooks.update)
        _import_from_collector("launcher.step_hooks").attach(optimizer_module)
    except Exception as error:
        print(f"etloom: nothing is recorded in process {os.getpid()}: {error!r}", file=sys.stderr)


def _pass_to_ray(ray: ModuleType) -> None:
    try:
        _import_from_collector("launcher.ray_hook").attach(ray)
    except Exception as error:
        print(f"etloom: the actors of a running Ray cluster are not recorded: {error!r}", file=sys.stderr)


def _start_fake_world(torch: ModuleType) -> None:
    import ctypes

    _import_from_collector("fake_world.session").start(torch, ctypes.CDLL(os.environ[_FAKE_DEVICE]))


class _Waiter:
    """Import hook that calls the function `then` with the module `awaited` after the job has imported it."""

    def __init__(self, awaited: str, then: Any) -> None:
        self._awaited, self._then = awaited, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._awaited:
            return None
        sys.meta_path.remove(self)
        if self._then is _start_fake_world:
            import ctypes

            ctypes.CDLL(os.environ[_FAKE_DEVICE])  # before torch, which asks for devices once
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
if _FAKE_DEVICE in os.environ:
    sys.meta_path.insert(0, _Waiter("torch", _start_fake_world))
elif "ETLOOM_COLLECT" in os.environ:
    sys.meta_path.insert(0, _Waiter(_AWAITED, _load_collector))
    if PathFinder.find_spec("ray") is not None:
        sys.meta_path.insert(0, _Waiter("ray", _pass_to_ray))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: _fork_hooks.get("before", int)(),
            after_in_parent=lambda: _fork_hooks.get("after_in_parent", int)(),
            after_in_child=lambda: _fork_hooks.get("after_in_child", int)(),
        )

_hidden = PathFinder.find_spec("sitecustomize", sys.path)
if _hidden is None or _hidden.loader is None:
    # As without this file: the module is missing, and `site` ignores exactly this error.
    raise ModuleNotFoundError("No module named 'sitecustomize'", name="sitecustomize")

from importlib.util import module_from_spec  # noqa: E402

_module = module_from_spec(_hidden)
sys.modules["sitecustomize"] = _module
_hidden.loader.exec_module(_module)
