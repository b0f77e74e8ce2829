"""Arguments of the public functions: checks of keywords, and conversion of paths to opened runs."""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path, PosixPath
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, is_typeddict

from etloom.core.errors import EtloomError, InvalidValue
from etloom.core.paths import expand_home
from etloom.core.registry import unknown_options_error
from etloom.core.trace import Job, Trace
from etloom.core.urls import UrlPath, as_path, clean_url


class PathUse(enum.Enum):
    """The use that a verb makes of an argument that is a path, or may be one."""

    READS = enum.auto()
    """The verb reads it; a URL is downloaded first."""
    WRITES = enum.auto()
    """The verb writes a file or folder; for a URL it is written locally, and uploaded when it is complete."""
    RESOLVES = enum.auto()
    """The verb itself resolves a URL."""


StrPath = Annotated[str | os.PathLike[str], PathUse.READS]
OutPath = Annotated[str | os.PathLike[str], PathUse.WRITES]
OwnPath = Annotated[str | os.PathLike[str], PathUse.RESOLVES]
Run = Trace | Job | StrPath
"""A run as the verbs take it: a Trace, a Job, or a path that is opened."""
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def verb(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a public function: check its keywords, expand ``~`` in paths, and download or upload URLs.

    A keyword that it does not have raises EtloomError with the nearest one it has. Paths may begin with ``~``, or be
    URLs of object stores: the function receives local paths.
    """
    names = _Names(vars(builtins) | function.__globals__)
    signature = inspect.signature(function, locals=names, eval_str=True)
    parameters = signature.parameters.values()
    uses = {item.name: set(_list_uses(item.annotation)) for item in parameters}
    read, written = ({name for name in uses if use in uses[name]} for use in (PathUse.READS, PathUse.WRITES))
    keyword_names = [
        item.name for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)
    ]
    others = next((item.annotation for item in parameters if item.kind is item.VAR_KEYWORD), None)
    if is_typeddict(others):  # Unpack[others]
        keyword_names += others.__annotations__
        others = None

    @functools.wraps(function)
    def call(*args: _Parameters.args, **keywords: _Parameters.kwargs) -> _Result:
        if others is None and (unknown := sorted(keywords.keys() - keyword_names)):
            raise unknown_options_error(f"etloom.{function.__name__}", unknown, keyword_names)
        bound = signature.bind(*args, **keywords)
        values = bound.arguments
        for name in filter(uses.get, values):
            values[name] = _map_paths(values[name], _expand_path)
        with ExitStack() as uploads:
            staged = [_stage(values, name, uploads) for name in values.keys() & written]
            for name in values.keys() & read:
                values[name] = _map_paths(values[name], _fetch_path)
            try:
                result = function(*bound.args, **bound.kwargs)
            except BaseException as error:  # a panic in polars is no Exception
                is_polars = type(error).__module__.partition(".")[0] in ("polars", "pyo3_runtime")
                if is_polars and function.__name__ != "open":  # the check opens paths
                    _check_tables_on_disk([values[name] for name in values.keys() & read])
                raise
        for folder, url in filter(None, staged):
            result = name_uploaded(result, folder, url)
        return result

    return call


class _Names(dict[str, Any]):
    """The names that annotations may use; a name that only type checkers import is a `_NotImported`."""

    def __missing__(self, name: str) -> type:
        return _NotImported(name, (), {})


class _NotImported(type):
    """A type, or a module of types, that only type checkers import; ``T[X]``, as in ``Unpack[X]``, is X."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return item


def _list_uses(annotation: Any) -> Iterator[PathUse]:
    """Yield the `PathUse` markers of a type, and of the types that it contains."""
    yield from (note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, PathUse))
    for part in get_args(annotation):
        yield from _list_uses(part)


def _check_tables_on_disk(runs: Any) -> None:
    """Read all tables of a run, or of several, to check their files; raise ReadError that names an unreadable file."""
    if isinstance(runs, (list, tuple, dict)) and not hasattr(runs, "_fields"):
        for run in runs.values() if isinstance(runs, dict) else runs:
            _check_tables_on_disk(run)
    elif isinstance(runs, (str, os.PathLike, Trace, Job)):
        for trace in as_job(runs).values():
            for loader in trace.loaders.values():
                loader.read()


def _map_paths(value: Any, change: Callable[[str | os.PathLike[str]], Any]) -> Any:
    """Apply the function ``change`` to a path, or to each path in a mapping or sequence; leave other values as is."""
    if isinstance(value, (str, os.PathLike)):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_paths(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_map_paths(item, change) for item in value)
    return value


def _expand_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Expand ``~`` in a path, and remove the credentials from a URL."""
    text = os.fspath(path)
    if text.startswith("~"):
        return expand_home(path)
    return as_path(path) if ":/" in text else path


def _fetch_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the path of the local copy of a URL; return any other path unchanged."""
    if (url := clean_url(path)) is None:
        return path
    from etloom.formats.io import mirror

    return mirror.fetch(url)


def _stage(values: dict[str, Any], name: str, uploads: ExitStack) -> tuple[Path, str] | None:
    """Replace an output argument's URL by a local path to upload later; return (local folder, its URL), or None."""
    if values[name] is None or (url := clean_url(values[name])) is None:
        return None
    from etloom.formats.io import mirror

    values[name] = uploads.enter_context(mirror.staged(url, bool(values.get("overwrite"))))
    return values[name].parent, url.rpartition("/")[0]


def name_uploaded(result: Any, folder: Path, url: str) -> Any:
    """Return a result in which each local path inside ``folder``, also nested, is replaced by its URL below ``url``."""
    if isinstance(result, PosixPath):
        is_inside = result.is_relative_to(folder)
        return UrlPath(f"{url}/{result.relative_to(folder).as_posix()}") if is_inside else result
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        return type(result)(name_uploaded(item, folder, url) for item in result)
    if isinstance(result, dict):
        return {
            name_uploaded(key, folder, url): name_uploaded(item, folder, url) for key, item in result.items()
        }
    if is_dataclass(result) and not isinstance(result, type):
        values = {item.name: getattr(result, item.name) for item in fields(result) if item.init}
        return replace(result, **{name: name_uploaded(item, folder, url) for name, item in values.items()})
    return result


def as_run(run: Run, *, for_report: bool = False) -> Trace | Job:
    """Return a Trace or Job unchanged; for a path, open the run and return its Job.

    ``for_report``: see `etloom.open`.

    Raises:
        EtloomError: it is neither Trace, Job nor path, or a Job without ranks.
        ReadError: the path cannot be read.
    """
    if isinstance(run, (str, os.PathLike)):
        from etloom.api.runs import open

        return open(run, for_report=for_report)
    remedy = "etloom.open(path) returns the Job of a folder or file"
    if not isinstance(run, (Trace, Job)):
        raise InvalidValue(f"expected a Trace, a Job or a path, got {type(run).__name__}", remedy=remedy)
    if isinstance(run, Job) and not run:
        raise InvalidValue("the Job has no ranks", remedy=remedy)
    return run


def as_job(run: Run, *, for_report: bool = False) -> Job:
    """Convert a run to a Job: open a path (see `as_run`, also for the errors), or wrap the Trace of a rank."""
    run = as_run(run, for_report=for_report)
    return run if isinstance(run, Job) else Job({run.rank or 0: run})


def as_collection(value: Any) -> Any:
    """Wrap a single text or integer in a tuple; return a collection unchanged, and () for None."""
    if value is None:
        return ()
    return (value,) if isinstance(value, (str, int)) else value


def as_paths(value: Any) -> list[Path]:
    """Convert a path, or a sequence of paths, to a list of Path."""
    return [Path(value)] if isinstance(value, (str, os.PathLike)) else [Path(file) for file in value]


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Create the parent folder of ``target``; convert an OSError in the block to an EtloomError naming ``target``."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise EtloomError(
            f"cannot be written: {error.strerror or error}", where=target, remedy="choose another path"
        ) from error
