"""SQL over the tables: what would read a file is refused however it is spelt, and what goes wrong is told by name."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom.core import sql
from etloom.core.errors import EtloomError, UnknownName
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace

EVENTS = pl.DataFrame(
    {"id": [0, 1], "name": ["read_csv('/etc/passwd')", "aten::mm"], "ts": [1, 2], "dur": [3, 4]},
)
TRACE = Trace({"events": TABLES["events"].conform(EVENTS)}, {"rank": 0})


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """A file that every function of polars can read in its format; here as CSV and as JSON lines."""
    file = tmp_path / "secret.csv"
    file.write_text("secret\n1\n")
    (tmp_path / "secret.json").write_text('{"secret": 1}\n')
    pl.DataFrame({"secret": [1]}).write_parquet(tmp_path / "secret.parquet")
    pl.DataFrame({"secret": [1]}).write_ipc(tmp_path / "secret.arrow")
    return str(file)


HOSTILE = [
    "select * from {f}('{p}')",
    "select * from {F}('{p}')",
    "select * from {f} ('{p}')",
    "select * from {f}\n\t('{p}')",
    "select * from {f}\u00a0('{p}')",
    "select * from {f}/* a */('{p}')",
    "select * from {f}--\n('{p}')",
    "select * from \"{f}\"('{p}')",
    "select * from `{f}`('{p}')",
    "select * from '{f}'('{p}')",
    "select * from '{f}' ('{p}')",
    "select id from events union all select secret from '{F}'('{p}')",
    "select * from \"{F}\" ('{p}')",
    "with a as (select * from {f}('{p}')) select * from a",
    "select * from events, {f}('{p}')",
    "select * from events e join {f}('{p}') r on true",
    "select (select max(secret) from {f}('{p}'))",
    "select * from events where dur in (select secret from {f}('{p}'))",
    "select name from events union all select secret from {f}('{p}')",
    "select * from (select * from (select * from {f}('{p}')) x) y",
    "with a as (from {f}('{p}')) select * from a",
    # Where a text ends is told wrongly by a reader of quotes alone.
    "select $$'$$ as x, s.* from {f}('{p}') s -- '",
    "select $a$'$a$ as x, s.* from {f}('{p}') s -- '",
    "select 1 as \"'\", s.* from {f}('{p}') s where 1 <> 2 or '\"' = ''",
    "select 1 as `'`, s.* from {f}('{p}') s where 1 <> 2 or '`' = ''",
    "select '\\', s.* from {f}('{p}') s -- '",
    "select /* ' */ s.* from {f}('{p}') s -- '",
    "select /* /* */ ' */ s.* from {f}('{p}') s -- '",
    "select 1 as x -- '\n, s.* from {f}('{p}') s -- '",
    "select 'it''s' as x, s.* from {f}('{p}') s",
]


def polars_reads(query: str) -> None:
    """Polars itself reads the file: else a test shows nothing. Not all of its versions take every form."""
    try:
        pl.SQLContext({"events": EVENTS.lazy()}, eager=False).execute(query).collect()
    except pl.exceptions.PolarsError:
        pytest.skip("this polars does not take that form")


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    ("function", "end"),
    [("read_csv", "csv"), ("read_json", "json"), ("read_parquet", "parquet"), ("read_ipc", "arrow")],
)
@pytest.mark.parametrize("what", [TRACE, Job({0: TRACE})], ids=["trace", "job"])
def test_no_file_is_read(text: str, function: str, end: str, what: Trace | Job, secret: str) -> None:
    path = secret.removesuffix("csv") + end
    query = text.format(f=function, F=function.title(), p=path)
    polars_reads(query)
    with pytest.raises(EtloomError, match=r"which reads files; a query sees the tables of the run only"):
        what.query(query)


@pytest.mark.parametrize("text", HOSTILE)
def test_the_plan_tells_of_a_file_where_the_text_did_not(
    text: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = text.format(f="read_csv", F="READ_CSV", p=secret)
    polars_reads(query)
    monkeypatch.setattr(sql, "_find_file_function", lambda text: None)
    with pytest.raises(EtloomError, match="which reads files"):
        TRACE.query(query)


@pytest.mark.parametrize(
    "statement", ["from", "explain select * from", "create table x as select * from", "table"]
)
def test_what_does_not_begin_with_select_or_with_is_refused(statement: str, secret: str) -> None:
    with pytest.raises(EtloomError, match="the query is not a SELECT"):
        TRACE.query(f"{statement} read_csv('{secret}')")


def test_a_text_may_say_anything_and_a_column_be_called_so() -> None:
    assert TRACE.query("select id from events where name = 'read_csv(''/etc/passwd'')'").item() == 0
    assert TRACE.query("select id from events where name like '%read_csv(%'").item() == 0
    assert TRACE.query("select dur as read_bytes, (dur + 1) as n from events where id = 0").rows() == [(3, 4)]
    assert TRACE.query("select 'CSV SCAN [x]' as x, id from events where id = 1 -- all").rows() == [
        ("CSV SCAN [x]", 1)
    ]


PIECES = st.sampled_from(
    [
        "'",
        '"',
        "`",
        "$$",
        "--",
        "\n",
        "/*",
        "*/",
        "\\",
        " ",
        ",",
        "(",
        ")",
        "1",
        "x",
        "''",
        "E'",
        "q'[",
        "]'",
        "U&'",
        "b'",
        "as",
    ]
)


@settings(max_examples=300, deadline=None)
@given(before=st.lists(PIECES, max_size=8).map("".join), after=st.lists(PIECES, max_size=6).map("".join))
def test_whatever_stands_around_it_no_file_is_read(
    before: str, after: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "hidden.csv"
    file.write_text("secret\n1\n")
    query = f"select {before} secret from read_csv('{file}') {after}"
    try:
        answer = TRACE.query(query)
    except EtloomError:
        return
    assert "secret" not in answer.columns and "read_csv" in str(answer.rows())


def test_a_count_is_called_count() -> None:
    assert TRACE.query("select count(*) from events").to_dict(as_series=False) == {"count": [2]}
    assert TRACE.query("select dur, COUNT(*) from events group by dur order by dur").columns == [
        "dur",
        "count",
    ]
    assert TRACE.query("select count(*) as len from events").columns == ["len"]
    assert TRACE.query("select count(*), max(dur) as count from events").columns == ["len", "count"]


@pytest.mark.parametrize("alias", ["events e", "events as e", 'events "e"', "events AS e"])
def test_an_unknown_column_of_an_alias_lists_the_columns_of_its_table(alias: str) -> None:
    with pytest.raises(UnknownName) as raised:
        TRACE.query(f"select e.zzzz from {alias} join nodes n on n.rf_id = e.rf_id")
    assert str(raised.value) == (
        f"unknown column of events 'zzzz'; expected one of {', '.join(sorted(TABLES['events'].schema))}"
    )
    with pytest.raises(UnknownName, match=r"unknown column of events 'nam'; did you mean 'name'\?"):
        TRACE.query(f"select e.nam from {alias}")
    with pytest.raises(UnknownName, match="unknown column of events 'durr'; did you mean 'dur'"):
        TRACE.query("select events.durr from events")
    with pytest.raises(UnknownName, match=r"unknown column of events 'world'; expected one of .*, rank, "):
        Job({0: TRACE}).query("select e.world from events e")


def test_a_table_of_the_query_s_own_is_no_table_of_ours() -> None:
    with pytest.raises(EtloomError, match="the query was refused: no column named 'zz' found in table 'e'"):
        TRACE.query("with e as (select 1 as x) select e.zz from e")
