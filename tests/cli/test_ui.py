"""The server of `etloom ui`: its answers, the requests that it refuses, and how it ends."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import etloom
from etloom.cli import main
from etloom.cli.run_arguments import RunOptions
from etloom.cli.ui import PageServer, RunPages, open_job
from etloom.core.errors import EtloomError
from support import small_traces
from support.examples import examples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_traces.write_run(tmp_path_factory.mktemp("ui") / "run")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[PageServer]:
    with PageServer(0, RunPages(run, RunOptions(cache=False))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def request(
    server: PageServer, address: str, method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    """Return status, text and headers of an answer; ``address`` begins after the token unless with a slash."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    path = address if address.startswith("/") else f"/{server.token}/{address}"
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    return answer.status, text, answer.headers


def test_requests_of_others_are_refused(server: PageServer) -> None:
    port, own = server.server_port, f"http://127.0.0.1:{server.server_port}"
    assert urlsplit(server.url).hostname == "127.0.0.1" and server.server_address[0] == "127.0.0.1"
    assert request(server, "")[0] == 200
    assert request(server, "", Host=f"localhost:{port}", Origin=own)[0] == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        "",
        "localhost",
    ):
        assert request(server, "", Host=host)[:2] == (421, "wrong Host"), host
    for origin in (
        "http://evil.example",
        "null",
        f"https://127.0.0.1:{port}",
        "http://127.0.0.1",
        own + ".evil",
    ):
        assert request(server, "ready", Origin=origin)[:2] == (403, "wrong Origin"), origin
    for address in (
        "/",
        f"/{server.token[:-1]}/",
        f"/{server.token}x/",
        "/x/ready",
        "/%",
    ):
        status, text, _ = request(server, address)
        assert status == 403 and server.token not in text, address
    assert request(server, f"/{server.token}")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
        assert request(server, "ready", method)[0] == 501


def test_two_hosts_are_refused(server: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        hosts = f"Host: 127.0.0.1:{server.server_port}\r\nHost: evil.example\r\n"
        connection.sendall(f"GET /{server.token}/ HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 421")


def test_answers_are_not_kept_nor_framed_nor_guessed(server: PageServer) -> None:
    status, page, headers = request(server, "")
    assert status == 200
    assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers.get("Access-Control-Allow-Origin") is None
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none'; connect-src 'self'; script-src 'sha256-")


def test_wrong_questions_are_one_line(server: PageServer) -> None:
    for question, problem in {
        "nothing": "unknown question 'nothing'",
        "slice": "rank: expected an integer, got ''",
        "slice?rank=99&cells=5&from=0&to=1": "the run has no events of rank 99",
        "slice?rank=0&cells=5&from=5&to=5": "expected from before to",
        "slice?rank=0&cells=5&from=0&to=9&rows=0.0": "rows as TRACK.FIRST.END separated by _",
        "event?rank=0&number=x": "number: expected an integer",
        "names?rank=" + "9" * 30: "rank: expected an integer",
        "no/run/ready": "unknown run 'no/run'",
        "../../etc/passwd": "unknown run '../../etc'",
    }.items():
        status, text, _ = request(server, question)
        assert status == 400 and problem in text and "\n" not in text and "internal" not in text, text


def test_ids_that_no_event_has_are_ignored(server: PageServer) -> None:
    for number in (-1, 1 << 32, 10**17):
        assert request(server, f"slice?rank=0&from=0&to=1&cells=1&rows=0.0.1&ids={number}")[0] == 200
        assert request(server, f"event?rank=0&id={number}&number=1")[:2] == (200, "null")


ARGUMENTS = ("rank", "from", "to", "rows", "cells", "ids", "q", "number", "id", "by")
VALUES = st.integers(-(2**70), 2**70).map(str) | st.sampled_from(
    [
        "0",
        "1",
        "5",
        "0.0.9",
        "0.0.9_1.0.64",
        "999.0.1_0.5.2",
        "1.2.3",
        "gemm",
        "track",
        "%00",
        "<b>",
        "",
        "_",
        ".",
    ]
)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(
    st.sampled_from(["overview", "slice", "names", "calls", "search", "event", "ready"]),
    st.dictionaries(st.sampled_from(ARGUMENTS), VALUES),
)
def test_no_request_breaks_the_server(server: PageServer, question: str, values: dict[str, str]) -> None:
    query = "&".join(f"{name}={value}" for name, value in {"rank": "0", **values}.items())
    status, text, headers = request(server, f"{question}?{query}")
    assert status in (200, 400)
    assert status == 200 or "internal error" not in text, text
    assert headers["Content-Length"] is not None


@pytest.mark.slow
def test_the_runs_of_a_store_are_listed_and_opened(tmp_path: Path, run: Path) -> None:
    for name in ("one", "two"):
        etloom.store_add(run, to=tmp_path / "store", name=name)
    with PageServer(0, RunPages(tmp_path / "store", RunOptions(cache=False))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, page, _ = request(server, "")
        assert status == 200 and '<a href="one/">one</a>' in page and '<a href="two/">two</a>' in page
        heads = re.findall(r'<th scope="col"[^>]*><button type="button">([^<]*)<', page)
        columns = ["run", "ranks", "hosts", "events", "mean step (µs)", "change (%)", "added (UTC)"]
        assert heads == [*columns, "stored by", "source"]
        assert "<td>etloom " in page and "is_current" not in page
        assert request(server, "two/search?rank=0&q=gemm")[:2] == (200, '{"events":1,"time":600000}')
        for address in ("three/", "ready", "run=one/", "one/two/", "..%2fone/", "../one/"):
            assert request(server, address)[0] == 400, address
        server.shutdown()


def write_named(folder: Path, name: str, count: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    row = {"ph": "X", "cat": "cpu_op", "name": name, "dur": 5, "pid": 1, "tid": 1}
    rows = [row | {"ts": 100 * number} for number in range(count)]
    folder.joinpath("rank0.json").write_text(
        json.dumps({"distributedInfo": {"rank": 0}, "schemaVersion": 1, "traceEvents": rows})
    )
    return folder


@pytest.mark.slow
def test_a_store_that_changes_is_read_again(tmp_path: Path) -> None:
    store, arguments = tmp_path / "store", {"rank": "0", "q": "gemm"}

    def add(name: str, count: int) -> None:
        shutil.rmtree(store / f"run={name}", ignore_errors=True)
        etloom.store_add(write_named(tmp_path / f"{name}{count}", "gemm", count), to=store, name=name)

    add("one", 1)
    pages = RunPages(store, RunOptions(cache=False))
    assert b'"events":1' in pages.answer(["search"], arguments)[1]
    assert b'href="one/"' not in pages.answer([""], {})[1]
    add("two", 2)
    assert b'href="two/"' in pages.answer([""], {})[1]
    assert b'"events":1' in pages.answer(["search"], arguments)[1]  # of the page that is still open
    assert b'"events":2' in pages.answer(["two", "search"], arguments)[1]
    add("two", 3)
    assert b'"events":3' in pages.answer(["two", "search"], arguments)[1]
    shutil.rmtree(store / "run=two")
    with pytest.raises(EtloomError, match="unknown run 'two'"):
        pages.answer(["two", "search"], arguments)
    assert b'"events":1' in pages.answer(["one", "search"], arguments)[1]


@pytest.mark.slow
def test_a_run_that_opens_slowly_does_not_hold_up_others(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        etloom.store_add(run, to=tmp_path / "store", name=name)
    pages = RunPages(tmp_path / "store", RunOptions(cache=False))
    has_begun, may_end = threading.Event(), threading.Event()

    def open_slowly(folder: Path, *arguments: Any, **options: Any) -> Any:
        if folder.name == "run=one":
            has_begun.set()
            assert may_end.wait(60)
        return open_job(folder, *arguments, **options)

    monkeypatch.setattr("etloom.cli.ui.open_job", open_slowly)
    question = {"rank": "0", "q": "gemm"}
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(pages.answer, ["one", "search"], question)
        assert has_begun.wait(60)
        try:
            assert pool.submit(pages.answer, ["two", "search"], question).result(60)[1]
            assert not slow.done()
        finally:
            may_end.set()
        assert slow.result(60)[1] == b'{"events":1,"time":600000}'


def test_a_port_in_use_and_a_missing_run_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        assert main(["ui", str(run), "--port", str(port)]) == 1
    message = f"etloom: port {port} cannot be used: Address already in use; choose another --port PORT\n"
    assert capsys.readouterr().err == message
    assert main(["ui", str(run / "nothing"), "--no-browser"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_it_prints_its_address_and_ends_by_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "etloom", "ui", str(run), "--no-browser", "--no-cache"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        url = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(url.netloc, timeout=60)
        connection.request("GET", f"{url.path}search?rank=0&q=gemm")
        assert json.loads(connection.getresponse().read())["events"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == "etloom: serving the page at this address; Ctrl-C ends it\n"
