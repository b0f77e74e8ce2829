"""Which backends of torch.distributed there are."""

from __future__ import annotations

from etloom.core.errors import UnknownName

BUILTIN_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
"""Those that torch knows of itself, whether or not it was built with them."""


def check_backend(name: str) -> None:
    """Raise UnknownName for a backend that torch does not know and no package has registered. Only a name that is not
    torch's own takes an import of torch."""
    if name not in BUILTIN_BACKENDS and name not in (known := registered_backends()):
        raise UnknownName("backend", name, known or BUILTIN_BACKENDS, option="backend")


def registered_backends() -> list[str]:
    """The backends that this torch has, also those of other packages; none where there is no torch."""
    try:
        from torch.distributed import Backend
    except ImportError:
        return []
    return [name for name in Backend.backend_list if name not in ("undefined", "fake")]
