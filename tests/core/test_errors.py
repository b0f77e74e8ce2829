"""Errors about the value of an argument are ValueErrors, wherever they are raised."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import etloom
from etloom.core.errors import CollectError, EtloomError, InvalidValue

PACKAGE = Path(etloom.__file__).parent
VALUE_ERRORS = {"InvalidValue", "UnknownName", "InvalidOption", "option_error"}


def find_errors_with_option() -> list[tuple[str, str]]:
    """Return place and class of each error that names the option whose value is wrong."""
    errors = []
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id[:1].isupper()
                and call.func.id.endswith(("Error", "Value", "Name", "Option"))
                and any(keyword.arg == "option" for keyword in call.keywords)
            ):
                errors.append((f"{path.relative_to(PACKAGE)}:{call.lineno}", call.func.id))
    return errors


@pytest.mark.slow
def test_each_error_that_names_an_option_is_a_value_error() -> None:
    errors = find_errors_with_option()
    assert len(errors) > 20
    assert [place for place, name in errors if name not in VALUE_ERRORS] == []


@pytest.mark.parametrize(
    ("verb", "arguments", "options"),
    [
        ("analyze", ("run", "top-ops"), {"top": 0}),
        ("analyze", ("run", "top-ops"), {"topp": 3}),
        ("analyze", ("run", "topops"), {}),
        ("analyze", ("run", "queue-summary"), {"limit": 0}),
        ("analyze", ("top-ops", "run"), {}),
        ("simulate", ("run", "comm * 2"), {}),
        ("simulate", ("run", ["comm x0"]), {}),
        ("open", ("run",), {"rank_pattern": "("}),
        ("query", ("run", "drop table events"), {}),
        ("export", ("run", "run.xyz"), {}),
        ("simulate", (3, "comm x0"), {}),
        ("collect", (["true"], "run.xyz"), {"max_bytess": 1}),
        ("collect", (["true"], "run.xyz"), {"max_bytes": -1}),
    ],
)
def test_verbs_raise_value_errors_for_bad_values(
    verb: str, arguments: tuple[object, ...], options: dict[str, object], own: Path, tmp_path: Path
) -> None:
    run = own / "ddp_2"
    places = {"run": run, "run.xyz": tmp_path / "run.xyz"}
    with pytest.raises(InvalidValue) as raised:
        getattr(etloom, verb)(*(places.get(str(value), value) for value in arguments), **options)
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, EtloomError)
    assert isinstance(raised.value, CollectError) == ("max_bytes" in options)
