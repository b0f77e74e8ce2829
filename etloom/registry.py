"""A kind of plugin is a folder, a plugin is a file in it.

``analyses/comm_overlap.py`` *is* the analysis ``comm-overlap``; nothing is registered by hand. Other packages
join through the entry points ``etloom.readers``, ``etloom.analyses`` and ``etloom.exports``, each naming a
module. What a module of each kind must hold is said in `CONTRACT` and held by the conformance tests; beside
that, the first line of its docstring says what it does, and an option is a keyword-only argument with a
default.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType
from typing import Any

from etloom.errors import EtloomError, UnknownName

CONTRACT = {
    "readers": ("sniff", "read"),
    "analyses": ("SCOPE", "COLUMNS", "analyze"),
    "exports": ("SUFFIX", "write"),
    "patterns": ("SCOPE", "find"),
}
_ENTRY = {"readers": "read", "analyses": "analyze", "exports": "write", "patterns": "find"}
_SINGULAR = {"readers": "reader", "analyses": "analysis", "exports": "export", "patterns": "pattern"}


@dataclass(frozen=True)
class Option:
    """A keyword-only argument of a plugin's function: what a command-line flag is made of."""

    name: str
    type: Any
    default: Any
    help: str


def names(kind: str) -> list[str]:
    """The names of all plugins of a kind, sorted."""
    return sorted(_found(kind))


def get(kind: str, name: str) -> ModuleType:
    """The module of a plugin.

    Raises UnknownName, with the nearest known one, and EtloomError for one that cannot be imported or does
    not hold what its kind must.
    """
    found = _found(kind)
    name = name.replace("_", "-")
    if name not in found:
        raise UnknownName(_SINGULAR[kind], name, found)
    try:
        module = importlib.import_module(found[name])
    except ImportError as error:
        raise EtloomError(
            f"the {_SINGULAR[kind]} {name!r} cannot be loaded: {error}",
            where=found[name],
            remedy="install what it needs, or remove the package it comes from",
        ) from error
    if missing := [part for part in CONTRACT[kind] if not hasattr(module, part)]:
        raise EtloomError(f"the {_SINGULAR[kind]} {name!r} lacks {', '.join(missing)}", where=found[name])
    return module


def summary(kind: str, name: str) -> str:
    """The first line of a plugin's docstring."""
    return (get(kind, name).__doc__ or "").strip().partition("\n")[0]


def options(kind: str, name: str) -> list[Option]:
    """The keyword-only arguments of a plugin's function, in their order.

    The help of an option is what follows ``option:`` where a line or sentence begins, in the docstring of the
    function or the module, to the end of that paragraph or the next option.
    """
    module = get(kind, name)
    function = getattr(module, _ENTRY[kind])
    found = {
        parameter.name: parameter
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    help = _option_help(
        f"{inspect.getdoc(function) or ''}\n\n{inspect.cleandoc(module.__doc__ or '')}", found
    )
    return [Option(one.name, one.annotation, one.default, help.get(one.name, "")) for one in found.values()]


def by_suffix(kind: str, path: str | PathLike[str]) -> str:
    """The name of the export whose SUFFIX ends the path; the longest wins. Raises UnknownName."""
    # What bears its format's name (run.parquet) needs no look at the others, which takes longer.
    for name in set(fspath(path).split(".")).intersection(names(kind)):
        if fspath(path).endswith(suffixes(kind, name)):
            return name
    known = {suffix: name for name in names(kind) for suffix in suffixes(kind, name)}
    fitting = [suffix for suffix in known if fspath(path).rstrip("/").endswith(suffix)]
    if not fitting:
        raise EtloomError(
            f"no {_SINGULAR[kind]} is known by the end of this name",
            where=fspath(path),
            remedy=f"end it in {', '.join(sorted(known))} or name the format: {', '.join(names(kind))}",
        )
    return known[max(fitting, key=len)]


def suffixes(kind: str, name: str) -> tuple[str, ...]:
    """What names of files of this plugin end in."""
    found = _found(kind)
    suffix = _literal(found[name], "SUFFIX") if name in found else None
    suffix = get(kind, name).SUFFIX if suffix is None else suffix
    return (suffix,) if isinstance(suffix, str) else tuple(suffix)


def _literal(module: str, name: str) -> Any:
    """A constant of a module as its source says it in one line, without importing what the module needs; else None."""
    if module in sys.modules:
        return getattr(sys.modules[module], name, None)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    said = re.search(rf"^{name} = (.+)$", Path(spec.origin).read_text(encoding="utf-8"), re.MULTILINE)
    try:
        return ast.literal_eval(said[1]) if said else None
    except (ValueError, SyntaxError):
        return None


def _option_help(text: str, options: Collection[str]) -> dict[str, str]:
    """Option -> what the text says of it, in one line."""
    if not options:
        return {}
    mark = rf"(?:^|(?<=\. )|(?<=\.\n))[ \t]*(?:[-*][ \t]+)?`{{0,2}}({'|'.join(options)})`{{0,2}}:\s"
    found: dict[str, str] = {}
    for paragraph in re.split(r"\n[ \t]*\n", text):
        # With one group, re.split gives: before the first mark, option, its text, option, its text, ...
        _, *parts = re.split(mark, paragraph, flags=re.MULTILINE)
        for option, said in zip(parts[::2], parts[1::2], strict=True):
            found.setdefault(option, " ".join(said.replace("`", "").split()))
    return found


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
