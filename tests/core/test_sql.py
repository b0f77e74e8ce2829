"""SQL over the tables: what would read a file is refused however it is spelt, and what goes wrong is told by name."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etloom.core import sql
from etloom.core.errors import EtloomError, UnknownName
from etloom.core.schema import TABLES
from etloom.core.trace import Job, Trace
from support.examples import examples

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
def test_the_plan_shows_a_file_scan_that_the_text_hides(
    text: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = text.format(f="read_csv", F="READ_CSV", p=secret)
    polars_reads(query)
    monkeypatch.setattr(sql, "_find_file_function", lambda text: None)
    with pytest.raises(EtloomError, match="which reads files"):
        TRACE.query(query)


def table_functions() -> list[str]:
    """The table functions of the installed polars: of the names in it, those that it does not call unknown."""
    prefix = r"(?:read|scan|write|sink)_"
    names = {name for name in dir(pl) if re.match(prefix, name)}
    with (
        Path(pl._plr.__file__).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        words = {match[0].decode() for match in re.finditer(rf"{prefix}[a-z_]{{2,20}}".encode(), content)}
    # Texts follow each other in the library without a separator, as in read_csvread_ipc.
    names |= {word for run in words for word in re.split(rf"(?<=[a-z])(?={prefix})", run)}
    formats = (
        "csv",
        "ipc",
        "json",
        "ndjson",
        "parquet",
        "avro",
        "delta",
        "iceberg",
        "excel",
        "text",
        "lines",
    )
    names |= {f"{verb}_{format}" for verb in ("read", "scan", "sink", "write") for format in formats}
    return sorted(filter(is_table_function, names))


def is_table_function(name: str) -> bool:
    try:
        pl.SQLContext(eager=False).execute(f"select * from {name}('/nonexistent/file')").collect_schema()
    except pl.exceptions.PolarsError as error:
        return "is not a supported table function" not in str(error)
    except OSError:
        pass
    return True


@pytest.mark.slow
def test_every_table_function_of_the_installed_polars_is_refused(secret: str) -> None:
    functions = table_functions()
    assert {"read_csv", "read_json", "read_parquet", "read_ipc"} <= set(functions)
    for function in functions:
        for source in (secret, "https://host.invalid/file", "s3://bucket/*.parquet"):
            with pytest.raises(EtloomError, match=f"names {function}, which reads files") as raised:
                TRACE.query(f"select * from {function}('{source}')")
            assert "\n" not in str(raised.value)


STATEMENTS = [
    "copy events to '{p}'",
    "copy (select 1) to '{p}'",
    "create table x as select * from events",
    "create or replace table events as select 1",
    "create view x as select 1",
    "create external table x (a int) stored as csv location '{p}'",
    "drop table events",
    "truncate table events",
    "delete from events",
    "insert into events values (1)",
    "update events set dur = 0",
    "merge into events using events on true when matched then delete",
    "show tables",
    "describe events",
    "explain select 1",
    "explain analyze select * from read_csv('{p}')",
    "attach '{p}' as x",
    "load 'x'",
    "load data local inpath '{p}' into table x",
    "install x",
    "pragma x",
    "set x = 1",
    "use x",
    "call x()",
    "prepare x as select 1",
    "execute x",
    "unload (select 1) to '{p}'",
    "export data options (uri='{p}') as select 1",
    "values (1)",
    "with a as (select 1) delete from events",
    "with a as (select 1) insert into events select 1",
    "select * into x from events",
    "select 1; drop table events",
    "select 1; select * from read_csv('{p}')",
    "select * from events; copy events to '{p}'",
    "select * from '{p}'",
    'select * from "{p}"',
    "select * from `{p}`",
    "select * from file('{p}')",
    "select * from url('{p}')",
    "select pg_read_file('{p}')",
    "select lo_import('{p}')",
    "select load_file('{p}')",
    "select readfile('{p}')",
    "select load_extension('{p}')",
    "select getenv('HOME')",
    "select name from events into outfile '{p}'",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_every_other_statement_and_function_of_files_is_refused(statement: str, secret: str) -> None:
    folder = Path(secret).parent
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(EtloomError) as raised:
        TRACE.query(statement.format(p=secret))
    assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert TRACE.query("select count(*) from events").item() == 2


def test_a_query_that_would_exhaust_the_stack_is_refused() -> None:
    for query in (" union all ".join(["select id from events"] * 5000), "select " + "(" * 9000):
        with pytest.raises(EtloomError, match=r"characters, the maximum is|recursion limit exceeded"):
            TRACE.query(query)


@pytest.mark.parametrize(
    "statement", ["from", "explain select * from", "create table x as select * from", "table"]
)
def test_queries_that_do_not_begin_with_select_or_with_are_refused(statement: str, secret: str) -> None:
    with pytest.raises(EtloomError, match="the query is not a SELECT"):
        TRACE.query(f"{statement} read_csv('{secret}')")


def test_a_string_or_a_column_may_contain_the_name_of_a_function() -> None:
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


@settings(max_examples=examples(300))
@given(before=st.lists(PIECES, max_size=8).map("".join), after=st.lists(PIECES, max_size=6).map("".join))
def test_no_file_is_read_whatever_surrounds_the_function(
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


def test_a_table_defined_in_the_query_is_not_one_of_etloom() -> None:
    with pytest.raises(EtloomError, match="the query was refused: no column named 'zz' found in table 'e'"):
        TRACE.query("with e as (select 1 as x) select e.zz from e")


GROUPING = [
    ("select cat, count(*) n from events group by cat", True),
    ("SELECT rank, cat, sum(dur) AS s FROM events GROUP BY rank, cat ORDER BY s DESC LIMIT 3;", True),
    ("select cat, name, max(dur + 1) from events group by cat, name", True),
    ("select cat, count(*) n from events group by cat order by cat", False),
    ("select cat, count(*) n from events group by cat order by 1", False),
    ("select cat as kind, count(*) n from events group by cat order by kind", False),
    ("select upper(cat) u, count(*) n from events group by cat", False),
    ("select cat, count(distinct name) n from events group by cat", False),
    ("select cat, count(*) n from events where name like 'aten%' group by cat", False),
    ("select cat, count(*) n from events group by cat having count(*) > 1", False),
    ("select dur, count(*) n from events group by dur, substr(cat, 1, 2)", False),
    ("select e.cat, count(*) n from events e group by e.cat", False),
    ('select "cat", count(*) n from events group by "cat"', False),
    ("select cat -- from events\n, count(*) n from events group by cat", False),
]


@pytest.mark.parametrize(("query", "only_groups"), GROUPING)
def test_groups_by_categories_equal_groups_by_text(
    query: str, only_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = pl.DataFrame(
        {
            "id": range(6),
            "cat": ["kernel", "cpu_op", None, "kernel", "cpu_op", "Zeta"],
            "name": ["aten::b", "aten::a", "aten::a", None, "aten::b", "x"],
            "dur": [1, 2, 3, 4, 50, 600],
        }
    )
    traces = {
        rank: Trace(
            {"events": TABLES["events"].conform(events[rank:].with_columns(pl.col("dur") * (7 + rank)))}
        )
        for rank in (0, 1)
    }
    scan = Job(traces)._scan
    assert sql._only_groups_by_categories(query, {"events": scan("events")}) is only_groups
    answers = [sql.run_query(scan, query, "in-memory")]
    monkeypatch.setattr(sql, "_only_groups_by_categories", lambda *_: False)
    answers.append(sql.run_query(scan, query, "in-memory"))
    first, second = ([sorted(map(str, answer.rows())), answer.schema] for answer in answers)
    assert first == second
