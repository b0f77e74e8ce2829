"""Validation of the options that a caller passes to a plugin."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

from etloom.core import registry
from etloom.core.errors import EtloomError

_PLUGIN_NOUNS = {"readers": "reader", "analyses": "analysis", "exports": "format"}
_ACCEPTED: dict[Any, tuple[str, tuple[type, ...]]] = {
    int: ("an integer", (Integral,)),
    float: ("a number", (Real,)),
    str: ("a string", (str,)),
    bool: ("True or False", (bool,)),
    NoneType: ("None", (NoneType,)),
}
"""Type of an option -> its name in messages, and the types that are accepted for it."""


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
    owner = f"the {_PLUGIN_NOUNS[kind]} {name!r}"
    known = {option.name: option for option in registry.list_options(kind, name)}
    if unknown := sorted(set(options) - set(known)):
        raise unknown_options_error(owner, unknown, known)
    for option, value in options.items():
        _check_value(owner, known[option], value)


def _check_value(owner: str, option: registry.Option, value: Any) -> None:
    types = get_args(option.type) or (option.type,)
    if not all(kind in _ACCEPTED for kind in types):
        return  # a type that only the plugin can check
    accepted = tuple(kind for declared in types for kind in _ACCEPTED[declared][1])
    if isinstance(value, Integral) and abs(int(value)) >= 1 << 63:
        raise EtloomError(
            f"the option {option.name!r} of {owner} is too large", remedy="it must fit in 64 bits"
        )
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        expected = " or ".join(_ACCEPTED[kind][0] for kind in types)
        raise EtloomError(
            f"the option {option.name!r} of {owner}: expected {expected}, got {value!r:.60}",
            remedy=f"its default is {option.default!r}",
        )


def unknown_options_error(owner: str, unknown: Iterable[str], known: Iterable[str]) -> EtloomError:
    """Return the error for keywords that a verb or plugin does not have."""
    unknown, known = list(unknown), list(known)
    near = difflib.get_close_matches(unknown[0], known, n=1)
    if not known:
        remedy = "it has no options"
    elif near and len(unknown) == 1:
        remedy = f"did you mean {near[0]!r}?"
    else:
        remedy = f"its options: {', '.join(known)}"
    plural = "s" * (len(unknown) > 1)
    return EtloomError(f"{owner} has no option{plural} {', '.join(map(repr, unknown))}", remedy=remedy)
