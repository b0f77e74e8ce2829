"""Values that no reader passes on, see src/etloom/formats/tables/value_checks.py."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from etloom.core.schema import TABLES, Stat
from etloom.core.trace import Trace
from etloom.formats.tables import value_checks
from etloom.formats.tables.meta_checks import check_meta
from etloom.formats.tables.value_checks import check_table


def test_rows_without_a_required_value_are_dropped_and_counted() -> None:
    rows = pl.DataFrame({"node": [1, 1, 2], "io": [0, None, 0], "index": [0, 1, None], "numel": [4, 4, None]})
    stats: list[Stat] = []
    kept = check_table("tensors", TABLES["tensors"].conform(rows), stats)
    assert kept.select("node", "io", "index").rows() == [(1, 0, 0)]
    assert [stat[:3] for stat in stats] == [("read.incomplete_rows", "data_loss", 2)]


def test_facts_without_their_event_are_dropped() -> None:
    rows = pl.DataFrame({"event": [0, None], "dims": ["[[2]]", "[[3]]"]})
    stats: list[Stat] = []
    assert check_table("arguments", TABLES["arguments"].conform(rows), stats)["event"].to_list() == [0]
    assert [stat[:3] for stat in stats] == [("read.incomplete_rows", "data_loss", 1)]


def test_events_without_a_start_are_dropped() -> None:
    rows = pl.DataFrame({"id": [0, 1, 2], "ts": [None, 5, 1 << 62], "dur": [3, 3, 3]})
    stats: list[Stat] = []
    assert check_table("events", TABLES["events"].conform(rows), stats)["id"].to_list() == [1]
    assert ("read.incomplete_rows", "data_loss", 2) in [stat[:3] for stat in stats]


def test_rows_without_an_id_are_dropped_before_parents_are_followed() -> None:
    rows = pl.DataFrame({"id": [0, None, 2, 3], "ts": [0, 1, 2, 3], "parent": [None, 0, 3, 2]})
    stats: list[Stat] = []
    checked = check_table("events", TABLES["events"].conform(rows), stats)
    assert checked.select("id", "parent").rows() == [(0, None), (2, None), (3, None)]
    assert [stat[:3] for stat in stats if stat.name != "read.absent_value"] == [
        ("read.incomplete_rows", "data_loss", 1),
        ("read.parent_cycle", "data_loss", 2),
    ]


def test_rows_with_the_id_of_an_earlier_row_are_dropped() -> None:
    rows = pl.DataFrame({"id": [0, 5, 0, 2, 5], "ts": [0, 1, 2, 3, 4]})
    stats: list[Stat] = []
    checked = check_table("events", TABLES["events"].conform(rows), stats)
    assert checked.select("id", "ts").rows() == [(0, 0), (5, 1), (2, 3)]
    assert [stat[:3] for stat in stats if stat.name != "read.absent_value"] == [
        ("read.repeated_id", "data_loss", 2)
    ]


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 2, 7]])
def test_references_to_rows_that_do_not_exist_are_removed_and_counted(ids: list[int]) -> None:
    """A required one with its row."""
    events = pl.DataFrame({"id": ids, "ts": [0, 1, 2], "parent": [None, ids[0], 9]})
    arguments = pl.DataFrame({"event": [ids[1], 5], "dims": ["[[2]]", "[[3]]"]})
    tables = {"events": events, "arguments": arguments}
    trace = value_checks.check_values(
        Trace({name: TABLES[name].conform(table) for name, table in tables.items()})
    )
    assert trace.events["parent"].to_list() == [None, ids[0], None]
    assert trace.arguments["event"].to_list() == [ids[1]]
    stats = trace.stats.filter(name="read.missing_reference")
    assert stats.select("severity", "count").rows() == [("data_loss", 1), ("data_loss", 1)]
    assert stats["example"].to_list()[0] == "events.parent 9 is not an id of events"


def test_a_complete_table_is_returned_as_it_is() -> None:
    frame = TABLES["tensors"].conform(pl.DataFrame({"node": [1], "io": [0], "index": [0], "numel": [None]}))
    stats: list[Stat] = []
    assert check_table("tensors", frame, stats) is frame
    assert not stats


TEXTS = [
    *r'[] [1] [0,1] [-1] [00] [1.5] [1e999] [NaN] [-0] [true,null] [tru] {} [ [1,] [,1] ["a"] ["a]'.split(),
    *r'["\ud800"] ["a\n",1] [99999,99999,99999] [99999,99999,999999] [999,999,999,999,999]'.split(),
    *r"[999,999,999,999,999,9] [4294967296] [[]] [[1],[2,3]] [[1],2] [[[1]],[2]] [[-1,2]] [[1],null]".split(),
    *(r'[["a",[1.5e3,"b"]],{}] [[[[1]]]]'.split()),
    *("[0, 1]", "[1 2]", "[\u0661]", "[1]\n", " [1]", "", f"[{'9' * 30}]", "[[1], [2, 3]]"),
]


@pytest.mark.parametrize("form", value_checks._FORMS)
@pytest.mark.parametrize("count", [1, 1000])
def test_values_accepted_without_parsing_are_valid(form: Any, count: int) -> None:
    texts = pl.Series([*TEXTS, *(f"[{n}]" for n in range(count))])
    unusual = set(value_checks._find_unusual_texts(texts, form))
    accepted = [text for text in texts if text not in unusual]
    assert len(accepted) > (count if form not in ("shapes", "strides") else 1)
    assert [text for text in accepted if not value_checks._FORMS[form](value_checks._parse(text))] == []


def test_figures_of_linking_that_a_saved_trace_states_wrongly_are_left_out() -> None:
    link = {
        "how": "rf_id",
        "score": 1.0,
        "iteration": None,
        "launched": 3,
        "device_work": "3",
        "coverage": [1],
    }
    meta = {"link": link, "linked": "yes", "clock": ["epoch"], "step_name": 3}
    stats: list[Stat] = []
    assert check_meta(meta, stats) == {
        "link": {"how": "rf_id", "score": 1.0, "iteration": None, "launched": 3}
    }
    assert stats == [
        Stat("read.invalid_meta", "data_loss", 5, "link.device_work '3' is not a valid value: left out")
    ]
