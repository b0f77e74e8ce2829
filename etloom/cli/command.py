"""Declaration of a command: its parameters as click objects, grouped into dataclasses where they belong together.

@command(PATH, click.Option(["--top"], type=int, default=10, help="Number of rows."), TABLE_OPTIONS, RUN_OPTIONS)
def verb(path: Path, top: int, table: TableOptions, run: RunOptions) -> None:
    '''Help text, with examples.'''
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from etloom.cli.error_handling import handle_errors
from etloom.core.paths import expand_home
from etloom.core.urls import as_path, clean_url

_OUTPUTS = ("out", "out_option", "html", "junit", "json_file")
"""Parameters that name a file to write."""
CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "show_default": True}


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


def command(
    *declared: click.Parameter | OptionGroup,
    renamed: Mapping[str, str] | None = None,
    help_values: Callable[[], Mapping[str, str]] | None = None,
    **settings: Any,
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that turns a function into a click command; the function's docstring is the help.

    Args:
        declared: arguments and options, in the order of the help.
        renamed: see `handle_errors`.
        help_values: returns the texts of the {words} in the help; called when the help is shown, as its imports may
            be slow.
        settings: further arguments of click.Command.
    """
    groups = [item for item in declared if isinstance(item, OptionGroup)]
    params: list[click.Parameter] = []
    for item in declared:
        params.extend(item.params if isinstance(item, OptionGroup) else [item])

    def decorate(function: Callable[..., Any]) -> click.Command:
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
