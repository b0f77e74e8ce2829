"""The registry and the errors: what is found, how options are told, what an unknown name is answered with."""

from __future__ import annotations

import importlib.metadata
import inspect
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated

import pytest

from etloom.core import errors, registry
from etloom.core.errors import EtloomError, ReadError, UnknownName


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An analysis of another package, found through its entry point."""
    module = ModuleType("elsewhere_analysis", "Count what matters.\n\nMore of it.")
    entry = importlib.metadata.EntryPoint("their_own", module.__name__, "etloom.analyses")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    real = registry.list_entry_points
    monkeypatch.setattr(
        registry,
        "list_entry_points",
        lambda group: [entry] if group == "etloom.analyses" else real(group),
    )
    registry._find_plugins.cache_clear()
    yield module
    registry._find_plugins.cache_clear()


def test_a_file_in_the_folder_is_a_plugin() -> None:
    assert "parquet" in registry.list_plugins("readers")
    assert "temporal-breakdown" in registry.list_plugins("analyses")
    assert registry.get("analyses", "temporal_breakdown") is registry.get("analyses", "temporal-breakdown")
    assert not [
        name for kind in registry.CONTRACT for name in registry.list_plugins(kind) if name.startswith("-")
    ]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown analysis 'top-opz'; did you mean 'top-ops'"):
        registry.get("analyses", "top-opz")
    with pytest.raises(UnknownName, match=r"unknown export 'zzz'; expected one of .*chrome, .*parquet"):
        registry.get("exports", "zzz")


def test_a_plugin_of_another_package(plugin: ModuleType) -> None:
    plugin.SCOPE, plugin.COLUMNS = "rank", {}  # type: ignore[attr-defined]
    with pytest.raises(
        EtloomError, match="the analysis 'their-own' of package elsewhere_analysis lacks analyze"
    ):
        registry.get("analyses", "their-own")

    def analyze(
        trace: object,
        *,
        top_n: Annotated[int, "How many of them."] = 3,
        step: Annotated[int | None, object(), "Only this step."] = None,
        rank: Annotated[int, object()] = 0,
        by: str = "x",
        other=None,  # type: ignore[no-untyped-def]
    ) -> None:
        """by: documented here only."""

    plugin.analyze = analyze  # type: ignore[attr-defined]
    assert registry.get("analyses", "their-own") is plugin
    assert registry.get_summary("analyses", "their-own") == "Count what matters."
    assert registry.list_options("analyses", "their-own") == [
        registry.Option("top_n", int, "How many of them.", 3),
        registry.Option("step", int | None, "Only this step.", None),
        registry.Option("rank", int, "", 0),
        registry.Option("by", str, "", "x"),
        registry.Option("other", inspect.Parameter.empty, "", None),
    ]


def test_a_plugin_that_cannot_be_imported_is_an_error_of_one_line(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, plugin.__name__)
    with pytest.raises(
        EtloomError,
        match="elsewhere_analysis: the analysis 'their-own' of package elsewhere_analysis cannot be loaded: No module",
    ):
        registry.get("analyses", "their-own")


def test_an_export_is_found_by_the_longest_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.find_by_suffix("exports", "a/run.json") == "chrome"
    assert registry.find_by_suffix("exports", "a/run.json.gz") == "chrome"
    assert registry.find_by_suffix("exports", "run.parquet/") == "parquet"
    with pytest.raises(EtloomError, match=r"a\.xyz: no export writes files with this suffix; end it in "):
        registry.find_by_suffix("exports", "a.xyz")
    monkeypatch.setattr(
        registry, "get_suffixes", lambda _, name: (".json",) if name == "chrome" else (".a.json",)
    )
    assert registry.find_by_suffix("exports", "x.a.json") == registry.list_plugins("exports")[-1] != "chrome"


def test_an_error_is_one_line_what_where_remedy() -> None:
    error = ReadError("is\n broken", where="a.json", remedy="read  another")
    assert str(error) == "a.json: is broken; read another"
    assert (error.what, error.where, error.remedy) == ("is\n broken", "a.json", "read  another")


@pytest.mark.parametrize(
    "error",
    [
        ReadError("a", where="b", remedy="c"),
        UnknownName("table", "event", ["events"]),
    ],
)
def test_errors_cross_process_borders(error: EtloomError) -> None:
    clone = pickle.loads(pickle.dumps(error))
    assert type(clone) is type(error)
    assert str(clone) == str(error)
    assert vars(clone) == vars(error)


def test_the_error_tree_is_drawn_at_its_head() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EtloomError)
    ]
    assert len(kinds) > 5
    for kind in kinds:
        assert kind.__name__ in (errors.__doc__ or "").split(), kind
