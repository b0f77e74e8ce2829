"""A kind of plugin is a folder, a plugin is a file in it.

``analyses/comm_overlap.py`` *is* the analysis ``comm-overlap``; nothing is registered by hand. Other packages join
through the entry points ``etloom.readers``, ``etloom.analyses`` and ``etloom.exports``, each naming a module.
What a module of each kind must hold is said in `CONTRACT` and held by the conformance tests.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from functools import cache
from types import ModuleType

from etloom.errors import UnknownName

CONTRACT = {
    "readers": ("sniff", "read"),
    "analyses": ("SCOPE", "COLUMNS", "analyze"),
    "exports": ("SUFFIX", "write"),
}


def names(kind: str) -> list[str]:
    """The names of all plugins of a kind, sorted."""
    return sorted(_found(kind))


def get(kind: str, name: str) -> ModuleType:
    """The module of a plugin. Raises UnknownName, with the nearest known one."""
    found = _found(kind)
    name = name.replace("_", "-")
    if name not in found:
        raise UnknownName({"readers": "reader", "analyses": "analysis", "exports": "export"}[kind], name, found)
    return importlib.import_module(found[name])


def summary(kind: str, name: str) -> str:
    """The first line of a plugin's docstring."""
    return (get(kind, name).__doc__ or "").strip().partition("\n")[0]


@cache
def _found(kind: str) -> dict[str, str]:
    """Name -> module path. Importing the folder's __init__ imports none of its files."""
    folder = importlib.import_module(f"etloom.{kind}")
    found = {
        module.name.replace("_", "-"): f"etloom.{kind}.{module.name}"
        for module in pkgutil.iter_modules(folder.__path__)
        if not module.name.startswith("_")
    }
    for entry in importlib.metadata.entry_points(group=f"etloom.{kind}"):
        found.setdefault(entry.name.replace("_", "-"), entry.value)
    return found
