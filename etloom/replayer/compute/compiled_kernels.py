"""Kernels that torch.compile made for a GPU: as operators, and the source of them that lies beside a trace.

An execution trace names such a kernel, its backend, the file with its Python source and its arguments; it gives nothing
but what it writes into these. Its source is saved where the recorder was told to
(`ExecutionTraceObserver.set_extra_resource_collection(True)`), in the folder ``<name>_resources``. It is code of
whoever wrote the trace: nothing of it is run unless the user allows it, and then only a plain file of that folder, by
its name.

Inductor's Triton kernels are known. They run on a GPU, or anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from etloom.replayer.compute.operators import Argument, Operator

ON_META = "no kernel runs on meta: it gives nothing but what it writes into its arguments, made as recorded"
_PLAIN = re.compile(r"\w+\.py", re.ASCII)
_MOST_BYTES = 1 << 24
_HOW_TO_RECORD = "ExecutionTraceObserver.set_extra_resource_collection(True) saves it"

Launch = Callable[..., Any]


class Kernels:
    """What becomes of the kernels of a trace. device: cpu, cuda or meta. folder: the resources beside the trace.
    allowed: Python code of that folder may be run."""

    def __init__(self, device: str = "cpu", folder: Path | None = None, allowed: bool = False) -> None:
        self._device = device
        self._folder = folder
        self._allowed = allowed
        self._kernels: dict[Path, _Kernel] = {}
        self._copies: tempfile.TemporaryDirectory[str] | None = None

    def resolve(self, node: dict[str, Any]) -> Operator | str:
        """The operator of a node with a kernel, or why it is not run. Its source is looked at, but not read."""
        named = str(node["kernel_backend"])
        kind = f"a {named[:40]} kernel: "
        backend = _BACKENDS.get(named)
        if backend is None:
            return kind + "no way to run one is known"
        values = json.loads(node["inputs"] or "[]")
        if not values or not isinstance(values, list):
            return kind + "its arguments were not recorded"
        recorded = str(node["kernel_file"] or "")
        # torch's observer cuts the path, and appends the stream to the arguments; before torch 2.7 also the grid, as
        # text. Ours does neither.
        given = [
            at
            for at, one in enumerate(values if "/" in recorded else values[:-1])
            if not (isinstance(one, str) and one.startswith("grid"))
        ]
        if self._device == "meta":
            return _operator(values, given, lambda *_: None, ON_META)
        source = self._source(recorded.rpartition("/")[2])
        if isinstance(source, str):
            return kind + source
        if not self._allowed:
            return kind + "its Python source lies beside the trace; --allow-code runs it"
        if lacks := backend.lacks(self._device):
            return kind + lacks
        if source not in self._kernels:
            self._kernels[source] = _Kernel(source, self._copy, backend.load)
        return _operator(values, given, self._kernels[source], backend.instead())

    def _source(self, name: str) -> Path | str:
        """The file of that name, or what is wrong with it."""
        if not _PLAIN.fullmatch(name):
            return "its file was not recorded" if not name else "the name of its file is no plain NAME.py"
        if self._folder is None:
            return f"its source is not beside the trace; {_HOW_TO_RECORD}"
        try:
            known = (self._folder / name).lstat()
        except OSError:
            return f"its source is not in {self._folder.name}; {_HOW_TO_RECORD}"
        if not stat.S_ISREG(known.st_mode) or known.st_size > _MOST_BYTES:
            return f"its source in {self._folder.name} is no plain file, or too large"
        return self._folder / name

    def _copy(self, source: Path) -> Path:
        """A copy in a folder of our own, since Inductor writes what it finds out about a kernel beside its source."""
        if self._copies is None:
            self._copies = tempfile.TemporaryDirectory(prefix="etloom-")
        copy = Path(self._copies.name, source.name)
        with os.fdopen(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            copy.write_bytes(file.read(_MOST_BYTES))
        return copy


class _Kernel:
    """A kernel whose source is run when it is called first: in the rehearsal, where what comes of it is an outcome."""

    def __init__(self, source: Path, copy: Callable[[Path], Path], load: Callable[[Path], Launch]) -> None:
        self._source = source
        self._copy = copy
        self._load = load
        self._launch: Launch | None = None

    def __call__(self, *arguments: Any) -> None:
        if self._launch is None:
            try:
                self._launch = self._load(self._copy(self._source))
            except (Exception, SystemExit) as error:
                self._launch = _failing(f"its source failed: {type(error).__name__}: {error}")
        self._launch(*arguments)


def _failing(why: str) -> Launch:
    """Of a kernel that is called often, the source fails once."""

    def fail(*_: Any) -> None:
        raise RuntimeError(why)

    return fail


def _operator(values: list[Any], given: list[int], call: Launch, instead: str | None) -> Operator:
    """An argument for each recorded value; those at the places ``given`` are passed on. It may write any tensor."""
    tensors = [one is None or (isinstance(one, list) and None in one) for one in values]
    arguments = tuple(
        Argument(str(at), "Tensor" if tensor else "Scalar", False, None, writes=tensor)
        for at, tensor in enumerate(tensors)
    )
    return Operator("kernel", call, arguments, tuple(arguments[at] for at in given), instead)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"etloom_kernel_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _interprets() -> bool:
    """Whether Inductor leaves its kernels to Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_lacks(device: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed here; pip install triton"
    if device != "cuda" and not _interprets():
        return "it needs a GPU, --device cuda; with TRITON_INTERPRET=1 set Triton interprets it, slowly"
    return None


def _triton_instead() -> str | None:
    return "by Triton's interpreter" if _interprets() else None


def _triton(path: Path) -> Launch:
    """The one kernel that a file of Inductor's defines."""
    import torch
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    if _interprets():
        # The file begins with a search for a GPU, without which an interpreter does well.
        with patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
            kernel = _only(CachingAutotuner, _module(path))
        return lambda *given: kernel.run(*given, stream=0)
    kernel = _only(CachingAutotuner, _module(path))
    # It says for which GPU it was made, and would be compiled for that one.
    here = torch.cuda.current_device()
    kernel.device_props = DeviceProperties.create(torch.device("cuda", here))
    kernel.triton_meta["device"] = here
    return lambda *given: kernel.run(*given, stream=torch.cuda.current_stream().cuda_stream)


def _only(kind: type, module: ModuleType) -> Any:
    found = [one for one in vars(module).values() if isinstance(one, kind)]
    if len(found) != 1:
        raise ValueError(f"it defines {len(found)} kernels, not one")
    return found[0]


class _Backend(NamedTuple):
    """lacks: what a device (cpu or cuda) lacks to run one. instead: by what it is run, if not as it was recorded. load:
    runs the source, and gives what runs the kernel."""

    lacks: Callable[[str], str | None]
    instead: Callable[[], str | None]
    load: Callable[[Path], Launch]


_BACKENDS = {"triton": _Backend(_triton_lacks, _triton_instead, _triton)}
"""By what execution traces call them."""
