"""Declaration of a command: each option once, as a parameter of its function or a field of a dataclass.

@command()
def verb(*, path: RunPath, top: Annotated[int, "Number of rows."] = 10, run: RunOptions) -> None:
    '''Help text, with examples.'''

A parameter ``Annotated[type, help, ...]`` is an option; without a default it is required. A parameter whose type is a
dataclass stands for the options that the fields of the dataclass declare.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from etloom.cli.error_handling import handle_errors
from etloom.core.annotations import split_annotation
from etloom.core.paths import expand_home
from etloom.core.urls import as_path, clean_url

_OUTPUTS = ("out", "out_option", "html", "junit", "json_file", "markdown")
"""Parameters that name a file to write."""
CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}


class Flag:
    """The spelling of an option on the command line: ``Annotated[type, help, Flag(...)]``.

    Args:
        names: short names ("-o") next to the name of the parameter, or all names ("--with").
        settings: of click.Option, such as metavar; by default ``type`` is that of the parameter.
    """

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names = names
        self.settings = settings

    def make_param(self, name: str, declared: Any, default: Any, help: str) -> click.Parameter:
        """Return the click parameter for a parameter of the type ``declared``.

        Help shows no default that is None, False or empty.
        """
        settings = {"type": _find_click_type(declared), "help": help, **self.settings}
        long = f"--{name.replace('_', '-')}"
        names = self.names if any(item.startswith("--") for item in self.names) else (long, *self.names)
        if default is inspect.Parameter.empty:
            settings["required"] = True
        if declared is bool and default is False:
            settings |= {"is_flag": True, "type": None}
        elif bool in (declared, *get_args(declared)):
            names = (f"{long}/--no-{long[2:]}",)
            settings |= {"default": default, "type": None}
        else:
            if _is_repeatable(declared):
                settings["multiple"] = True
            if default not in (None, (), inspect.Parameter.empty):
                settings["default"] = default
        return click.Option([name, *names], **settings)


class Positional(Flag):
    """A positional argument: ``Annotated[type, help, Positional("PATH")]``; a sequence takes all remaining words."""

    def __init__(self, metavar: str, **settings: Any) -> None:
        super().__init__(metavar=metavar, **settings)

    def make_param(self, name: str, declared: Any, default: Any, help: str) -> click.Parameter:
        settings = {"type": _find_click_type(declared), "nargs": -1 if _is_repeatable(declared) else 1}
        is_required = default is inspect.Parameter.empty
        return Argument([name], required=is_required, help=help, **(settings | self.settings))


class FieldFlags:
    """The spelling of the options of a dataclass: ``Annotated[Options, FieldFlags(every=Flag(metavar="N"))]``.

    The command has no option for a field that is None here.
    """

    def __init__(self, **flags: Flag | None) -> None:
        self.flags = flags


@dataclass(frozen=True)
class OptionGroup:
    """A group of options whose values a command receives as a single argument, a dataclass.

    Attributes:
        argument: name of the command function's argument.
        values: the dataclass; its fields are the names of the options.
        params: the options.
    """

    argument: str
    values: type[Any]
    params: Sequence[click.Parameter]

    def pack(self, values: dict[str, Any]) -> None:
        """Replace the options' entries in `values` by a single entry that holds them as the dataclass."""
        names = [param.name for param in self.params if param.name is not None]
        values[self.argument] = self.values(**{name: values.pop(name) for name in names})


def read_parameters(function: Callable[..., Any]) -> list[click.Parameter | OptionGroup]:
    """Return the options that a function declares (see the module), in order."""
    declared: list[click.Parameter | OptionGroup] = []
    for item in inspect.signature(function, eval_str=True).parameters.values():
        kind, notes = split_annotation(item.annotation)
        if is_dataclass(kind):
            declared.append(OptionGroup(item.name, kind, _read_fields(kind, notes)))  # type: ignore[arg-type]
        elif notes:
            declared.append(_make_param(item.name, kind, item.default, notes))
    return declared


def _read_fields(values: Any, notes: Sequence[Any]) -> list[click.Parameter]:
    """Return the options that the fields of a dataclass declare; a field without help is not an option."""
    flags = next((note.flags for note in notes if isinstance(note, FieldFlags)), {})
    hints = get_type_hints(values, include_extras=True)
    params = []
    for item in fields(values):
        kind, notes = split_annotation(hints[item.name])
        if notes and (flag := flags.get(item.name, Flag())) is not None:
            default = inspect.Parameter.empty if item.default is MISSING else item.default
            params.append(_make_param(item.name, kind, default, (*notes, flag)))
    return params


def _make_param(name: str, kind: Any, default: Any, notes: Sequence[Any]) -> click.Parameter:
    (help,) = (note for note in notes if isinstance(note, str))
    flag = next((note for note in notes if isinstance(note, Flag)), Flag())
    return flag.make_param(name, kind, default, help)


def _is_repeatable(declared: Any) -> bool:
    return get_origin(declared) in (tuple, collections.abc.Sequence)


def _find_click_type(declared: Any) -> click.ParamType[Any]:
    """Return the click type of a parameter's type, or of what it holds; None and ``...`` do not count."""
    if get_origin(declared) is Literal:
        return click.Choice(get_args(declared))
    if declared in (Path, float):
        return PATH_TYPE if declared is Path else FiniteFloat()
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return click.Choice(declared)
    parts = [part for part in get_args(declared) if part not in (NoneType, ...)]
    return _find_click_type(parts[0]) if parts else click.INT if declared is int else click.STRING


def command(
    *declared: click.Parameter | OptionGroup,
    renamed: Mapping[str, str] | None = None,
    help_values: Callable[[], Mapping[str, str]] | None = None,
    **settings: Any,
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that turns a function into a click command; the function's docstring is the help.

    Args:
        declared: arguments and options, in the order of the help; default: those that the function declares.
        renamed: see `handle_errors`.
        help_values: returns the texts of the {words} in the help; called when the help is shown, as its imports may
            be slow.
        settings: further arguments of click.Command.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        parameters = declared or read_parameters(function)
        groups = [item for item in parameters if isinstance(item, OptionGroup)]
        params: list[click.Parameter] = []
        for item in parameters:
            params.extend(item.params if isinstance(item, OptionGroup) else [item])

        @functools.wraps(function)
        def call_with_groups(**values: Any) -> Any:
            _check_outputs(params, values)
            for group in groups:
                group.pack(values)
            return function(**values)

        callback = handle_errors(**(renamed or {}))(call_with_groups)
        settings.setdefault("help", inspect.getdoc(function))
        context_settings = {**CONTEXT_SETTINGS, **settings.pop("context_settings", {})}
        name = settings.pop("name", function.__name__)
        result = VerbCommand(
            name, params=params, callback=callback, context_settings=context_settings, **settings
        )
        result.help_values = help_values
        return result

    return decorate


def _check_outputs(params: Sequence[click.Parameter], values: Mapping[str, Any]) -> None:
    """Raise EtloomError if the command would overwrite a trace that it reads."""
    inputs: list[Path] = []
    outputs: list[Path] = []
    for param in params:
        value = values.get(param.name or "")
        paths = [value] if isinstance(value, Path) else value if isinstance(value, tuple) else ()
        if param.name in _OUTPUTS:
            outputs += paths
        elif isinstance(param.type, UserPath):
            inputs += paths
    if any(map(os.path.lexists, outputs)):
        from etloom.cli.output_files import check_outputs

        check_outputs(inputs, outputs)


class Argument(click.Argument):
    """A positional argument with a help text, which click supports only since version 8.5."""

    def __init__(self, *args: Any, help: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.help = help


class VerbCommand(click.Command):
    """A click command whose help also lists positional arguments, and may contain computed values."""

    help_values: Callable[[], Mapping[str, str]] | None = None

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text, with placeholders such as {presets} replaced by the texts of `help_values`."""
        if self.help_values is not None and self.help is not None:
            self.help = self.help.format(**self.help_values())
            self.help_values = None
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        arguments = [
            (param.make_metavar(ctx), param.help or "")
            for param in self.params
            if isinstance(param, Argument)
        ]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        super().format_options(ctx, formatter)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: `format_options` has listed the arguments."""


class FiniteFloat(click.FloatRange):
    """The click type of a finite number within bounds; it rejects nan and infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {number}", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()


class UserPath(click.Path):
    """The click type of a local path or the URL of an object store.

    A path may begin with ``~``, which the shell leaves alone in quotes and in ``--out=~/run``.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if clean_url(os.fsdecode(value)) is not None:
            return as_path(os.fsdecode(value))
        return as_path(expand_home(os.fsdecode(super().convert(value, param, ctx))))


class LocalPath(UserPath):
    """The click type of a local path; a URL is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if (url := clean_url(os.fsdecode(value))) is not None:
            self.fail(f"expected a local path, got {url}", param, ctx)
        return super().convert(value, param, ctx)


PATH_TYPE = UserPath(path_type=Path)
"""A path; whether it exists and is readable is checked by the code that opens it, as for files of a folder."""
LOCAL_PATH_TYPE = LocalPath(path_type=Path)
