"""Backends of torch.distributed."""

from __future__ import annotations

from etloom.core.errors import UnknownName

BUILTIN_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
"""The backends that torch knows, whether or not it was built with them."""
GPU_BACKENDS = ("nccl", "ucc")


def check_backend(name: str) -> None:
    """Check that torch knows a backend or a package has registered it.

    torch is imported only for names that are not built in.

    Raises:
        UnknownName: There is no such backend.
    """
    if name not in BUILTIN_BACKENDS and name not in (registered := registered_backends()):
        raise UnknownName("backend", name, registered or BUILTIN_BACKENDS, option="backend")


def registered_backends() -> list[str]:
    """Return the backends of the installed torch, including those of other packages; none without torch."""
    try:
        from torch.distributed import Backend
    except ImportError:
        return []
    return [name for name in Backend.backend_list if name not in ("undefined", "fake")]
