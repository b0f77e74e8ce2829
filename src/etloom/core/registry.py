"""Finds plugins (readers, analyses, exports, ...): each kind is a package, each plugin a module in it.

``analyses/comm_overlap.py`` is the analysis ``comm-overlap``; nothing is registered by hand. Other packages add
plugins through the entry points ``etloom.readers``, ``etloom.analyses`` and ``etloom.exports``, each naming a module
(docs/plugins.md has an example). `CONTRACT` lists what a module of each kind must define; conformance tests check it.
The first line of its docstring describes the plugin, and each keyword-only argument with a default is an option:
``top: Annotated[int, "Number of rows."] = 20`` declares its type, help and default.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any, get_args

from etloom.core.annotations import split_annotation
from etloom.core.errors import EtloomError, InvalidValue, UnknownName

CONTRACT = {
    "readers": {
        "sniff": "function (bytes) -> bool: whether a file has this format, from its first 64 KiB, decompressed; "
        "for Parquet, also from its last ones",
        "read": "function (path, *, option=default, ...) -> Trace or Job; raises ReadError if it cannot read the file",
    },
    "analyses": {
        "SCOPE": '"rank": analyze receives a Trace and runs once per rank; "job": it receives a Job',
        "COLUMNS": "dict of str to polars type: the columns of the result, in order; names end in units (_ns, _pct)",
        "analyze": "function (trace or job, *, option=default, ...) -> polars.DataFrame of exactly these columns",
    },
    "exports": {
        "SUFFIX": 'str, or tuple of str: the endings of the names of such files, such as ".json.gz"',
        "write": "function (trace or job, path, *, option=default, ...) -> None",
    },
    "patterns": {
        "SCOPE": '"rank": find receives the view of one rank; "job": the views of all ranks, by rank',
        "find": 'function (view) -> iterable of Finding; of "job" (views) -> iterable of (rank, Finding)',
    },
}
"""Kind -> names that its modules must define -> their types and values."""
OPTIONAL = {
    "analyses": {
        "check_rank": 'function (trace) -> AnalysisError or None: of "job", why the rank is left out of the job',
    },
    "exports": {
        "find_converter": "function (source, reader or None) -> function (target, progress) that converts the file "
        "without reading it as a trace, or None if it cannot",
        "list_files": "function (trace or job, path) -> list of the files that `write` creates, if not only path",
    },
}
"""Kind -> optional functions of its modules, and what they do."""
PACKAGES = {
    "readers": "etloom.formats",
    "analyses": "etloom.analyses",
    "exports": "etloom.exports",
    "patterns": "etloom.analyses.findings.patterns",
}
"""Kind -> the package that holds its plugins. HELPERS of that package names its modules that are not plugins."""

_ENTRY_FUNCTIONS = {"readers": "read", "analyses": "analyze", "exports": "write", "patterns": "find"}
_KIND_NOUNS = {"readers": "reader", "analyses": "analysis", "exports": "export", "patterns": "pattern"}
SYNONYMS = {
    "analyses": {
        "breakdown": "temporal-breakdown",
        "communication": "collectives",
        "gpu-kernels": "kernel-breakdown",
        "kernels": "kernel-breakdown",
        "memory": "memory-timeline",
        "operators": "top-ops",
        "overlap": "comm-overlap",
        "top-kernels": "kernel-breakdown",
        "top-operators": "top-ops",
    }
}
"""Kind -> names that users try, with the plugin that answers them; for the remedy of the error only."""
_ACCEPTED: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("an integer", (Integral,)),
    float: ("a number", (Real,)),
    str: ("a string", (str,)),
    bool: ("True or False", (bool,)),
    NoneType: ("None", (NoneType,)),
}
"""Type of an option -> its name in messages, and the types that are accepted for it."""


@dataclass(frozen=True)
class Option:
    """A keyword-only argument of a plugin's function, from which a command-line flag is made."""

    name: str
    type: Any
    help: str
    default: Any


def list_plugins(kind: str) -> list[str]:
    """Return the names of all plugins of a kind, sorted."""
    return sorted(_find_plugins(kind))


def get(kind: str, name: str) -> ModuleType:
    """Import and return the module of a plugin.

    Raises:
        UnknownName: There is no such plugin; the remedy is the nearest name.
        EtloomError: It cannot be imported or does not define what its kind requires.
    """
    plugin = _get_plugin(kind, name)
    try:
        module = importlib.import_module(plugin.module)
    except Exception as error:
        if plugin.package is None and not isinstance(error, ImportError):
            raise
        reason = str(error) if isinstance(error, ImportError) else _format_exception(error)
        raise EtloomError(
            f"{_describe_plugin(kind, name)} cannot be loaded: {reason}",
            where=plugin.module,
            remedy="install what it needs, or remove its package; an entry point names a module, without a function",
        ) from error
    # Built-in plugins are checked by the conformance tests.
    if plugin.package is not None and (fault := _find_contract_violation(kind, module)):
        raise EtloomError(
            f"{_describe_plugin(kind, name)} {fault}", where=plugin.module, remedy="docs/plugins.md shows one"
        )
    return module


def find_package(kind: str, name: str) -> str | None:
    """Return the name of the package that provides a plugin; None for a plugin of etloom. Raises UnknownName."""
    return _get_plugin(kind, name).package


def _get_plugin(kind: str, name: str) -> _Plugin:
    plugins = _find_plugins(kind)
    if not isinstance(name, str):
        raise InvalidValue(f"expected the name of a plugin ({_KIND_NOUNS[kind]}), got {type(name).__name__}")
    name = name.replace("_", "-")
    if name not in plugins:
        raise UnknownName(_KIND_NOUNS[kind], name, plugins, synonyms=SYNONYMS.get(kind))
    return plugins[name]


@contextmanager
def name_plugin_in_errors(kind: str, name: str) -> Iterator[None]:
    """Convert any exception of another project's plugin, except EtloomError, to one that names the plugin and its
    package.
    """
    try:
        yield
    except EtloomError:
        raise
    except Exception as error:
        if find_package(kind, name) is None:
            raise
        raise EtloomError(
            f"{_describe_plugin(kind, name)} failed: {_format_exception(error)}",
            remedy="report it to the authors of the package; ETLOOM_DEBUG=1 shows where",
        ) from error


def check_answer(name: str, answer: Any) -> None:
    """Raise EtloomError if the result of another project's analysis is not the table that it declares."""
    if find_package("analyses", name) is None:
        return  # the conformance tests check ours
    import polars as pl

    def refuse(what: str) -> EtloomError:
        return EtloomError(
            f"{_describe_plugin('analyses', name)} {what}", remedy="its COLUMNS and its result must agree"
        )

    if not isinstance(answer, pl.DataFrame):
        raise refuse(f"returns {type(answer).__name__}; expected a polars DataFrame")
    declared = pl.Schema(get("analyses", name).COLUMNS)
    if answer.columns != declared.names():
        raise refuse(
            f"returns the columns {', '.join(answer.columns)}, but declares {', '.join(declared.names())}"
        )
    for column, dtype in declared.items():
        if answer.schema[column] != dtype:
            raise refuse(f"returns {column} as {answer.schema[column]}, but declares {dtype}")


def _describe_plugin(kind: str, name: str) -> str:
    origin = f" of package {package}" if (package := find_package(kind, name)) else ""
    return f"the {_KIND_NOUNS[kind]} {name!r}{origin}"


def _format_exception(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _find_contract_violation(kind: str, module: ModuleType) -> str | None:
    """Return how a plugin module violates its kind's `CONTRACT`, as the end of a sentence; None if it does not."""
    if missing := [part for part in CONTRACT[kind] if not hasattr(module, part)]:
        return f"lacks {', '.join(missing)}"
    for part, wanted in CONTRACT[kind].items():
        value = getattr(module, part)
        fits = {
            "SCOPE": isinstance(value, str) and value in ("rank", "job"),
            "COLUMNS": isinstance(value, dict) and all(map(_is_column, value.items())),
            "SUFFIX": isinstance(value, (str, tuple)),
        }
        if not fits.get(part, callable(value)):
            return f"defines {part} = {str(value)[:60]!r}; expected: {wanted}"
    for name, description in OPTIONAL.get(kind, {}).items():
        if hasattr(module, name) and not callable(value := getattr(module, name)):
            return f"defines {name} = {str(value)[:60]!r}; expected: {description}"
    entry = _ENTRY_FUNCTIONS[kind]
    try:
        parameters = inspect.signature(getattr(module, entry)).parameters.values()
    except (ValueError, TypeError):  # a function of C, such as max
        return f"defines {entry} as a function without a signature; expected: {CONTRACT[kind][entry]}"
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is not parameter.empty:
            return f"declares the option {parameter.name!r} of {entry} without * before it: options are keyword-only"
    return None


def _is_column(column: tuple[Any, Any]) -> bool:
    import polars as pl

    name, dtype = column
    is_type = isinstance(dtype, pl.DataType) or (isinstance(dtype, type) and issubclass(dtype, pl.DataType))
    return isinstance(name, str) and is_type


def get_summary(kind: str, name: str) -> str:
    """Return the first line of a plugin's docstring."""
    return (get(kind, name).__doc__ or "").strip().partition("\n")[0]


def list_options(kind: str, name: str) -> list[Option]:
    """Return the keyword-only arguments of a plugin's function, in order.

    The help of an option is the text in its ``Annotated`` type; it is empty for any other type.
    """
    function = getattr(get(kind, name), _ENTRY_FUNCTIONS[kind])
    options = []
    for item in inspect.signature(function, eval_str=True).parameters.values():
        if item.kind is inspect.Parameter.KEYWORD_ONLY:
            declared, notes = split_annotation(item.annotation)
            help = next((note for note in notes if isinstance(note, str)), "")
            options.append(Option(item.name, declared, help, item.default))
    return options


def find_by_suffix(kind: str, path: str | PathLike[str]) -> str:
    """Return the name of the plugin with the longest SUFFIX that the path ends in. Raises InvalidValue."""
    # What bears its format's name (run.parquet) needs no look at the others, which takes longer.
    for name in set(fspath(path).split(".")).intersection(list_plugins(kind)):
        if fspath(path).endswith(get_suffixes(kind, name)):
            return name
    name_by_suffix = {suffix: name for name in list_plugins(kind) for suffix in get_suffixes(kind, name)}
    fitting = [suffix for suffix in name_by_suffix if fspath(path).rstrip("/").endswith(suffix)]
    if not fitting:
        raise InvalidValue(
            f"no {_KIND_NOUNS[kind]} writes files with this suffix",
            where=fspath(path),
            remedy=f"end it in {', '.join(sorted(name_by_suffix))} or name the format: {', '.join(list_plugins(kind))}",
        )
    return name_by_suffix[max(fitting, key=len)]


def get_suffixes(kind: str, name: str) -> tuple[str, ...]:
    """Return the file name suffixes that a plugin declares (SUFFIX)."""
    plugins = _find_plugins(kind)
    suffix = _read_constant(plugins[name].module, "SUFFIX") if name in plugins else None
    suffix = get(kind, name).SUFFIX if suffix is None else suffix
    return (suffix,) if isinstance(suffix, str) else tuple(suffix)


def _read_constant(module: str, name: str) -> Any:
    """Return a constant from an assignment in a module's source, without importing it; None if absent."""
    if module in sys.modules:
        return getattr(sys.modules[module], name, None)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            with suppress(ValueError):  # it is computed, and must be imported
                return ast.literal_eval(node.value)
    return None


@dataclass(frozen=True)
class _Plugin:
    module: str
    package: str | None = None  # of another project


@cache
def _find_plugins(kind: str) -> dict[str, _Plugin]:
    """Return the plugins of a kind by name. Importing the package's __init__ imports none of its modules."""
    folder = importlib.import_module(PACKAGES[kind])
    helpers = getattr(folder, "HELPERS", ())
    plugins = {
        module.name.replace("_", "-"): _Plugin(f"{PACKAGES[kind]}.{module.name}")
        for module in pkgutil.iter_modules(folder.__path__)
        if not module.name.startswith("_") and module.name not in helpers
    }
    for entry in list_entry_points(f"etloom.{kind}"):
        package = entry.dist.name if entry.dist else entry.value.partition(".")[0]
        plugins.setdefault(entry.name.replace("_", "-"), _Plugin(entry.value, package))
    return plugins


def list_entry_points(group: str) -> importlib.metadata.EntryPoints:
    """Return the entry points of a group; the metadata of the installed packages is read once."""
    points: importlib.metadata.EntryPoints = _read_entry_points(tuple(sys.path)).select(group=group)
    return points


@cache
def _read_entry_points(path: tuple[str, ...]) -> Any:
    """Return the entry points of all installed packages, cached by the module search path ``path``."""
    return importlib.metadata.entry_points()


def check_options(kind: str, name: str, options: Mapping[str, Any]) -> None:
    """Check that a plugin has all of the options, and that their values have the declared types.

    Options of other types than int, float, str, bool and None are left to the plugin.

    Args:
        kind: "readers", "analyses" or "exports".
        name: of the plugin.
        options: name -> value.

    Raises:
        EtloomError: the plugin has no such option, or the value has the wrong type.
    """
    if not options:
        return
    owner = f"the {_KIND_NOUNS[kind]} {name!r}"
    known = {option.name: option for option in list_options(kind, name)}
    if unknown := sorted(set(options) - set(known)):
        raise unknown_options_error(owner, unknown, known)
    for option, value in options.items():
        _check_value(owner, known[option], value)


def _check_value(owner: str, option: Option, value: Any) -> None:
    types = get_args(option.type) or (option.type,)
    if not all(kind in _ACCEPTED for kind in types):
        return  # a type that only the plugin can check
    accepted = tuple(kind for declared in types for kind in _ACCEPTED[declared][1])
    if isinstance(value, Integral) and abs(int(value)) >= 1 << 63:
        raise InvalidValue(
            f"the option {option.name!r} of {owner} is too large", remedy="it must fit in 64 bits"
        )
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        expected = " or ".join(_ACCEPTED[kind][0] for kind in types)
        raise InvalidValue(
            f"the option {option.name!r} of {owner}: expected {expected}, got {value!r:.60}",
            remedy=f"its default is {option.default!r}",
        )


def unknown_options_error(owner: str, unknown: Iterable[str], known: Iterable[str]) -> InvalidValue:
    """Return the error for options that a verb or plugin does not have; the remedy names a similar option or all."""
    unknown, known = list(unknown), list(known)
    near = difflib.get_close_matches(unknown[0], known, n=1)
    if not known:
        remedy = "it has no options"
    elif near and len(unknown) == 1:
        remedy = f"did you mean {near[0]!r}?"
    else:
        remedy = f"its options: {', '.join(known)}"
    plural = "s" * (len(unknown) > 1)
    return InvalidValue(f"{owner} has no option{plural} {', '.join(map(repr, unknown))}", remedy=remedy)
