"""etloom ui: the page of a run from a server of this machine, for runs that are too large for a file."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import click

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import make_printable, print_message
from etloom.cli.loopback import HOST, check_port, list_hosts, list_origins
from etloom.cli.run_arguments import RunOptions, check_readable, open_job
from etloom.core.errors import EtloomError
from etloom.core.urls import redact

if TYPE_CHECKING:
    from etloom.reports.served_run import ServedRun

MAX_OPEN_RUNS = 4
"""Runs of a store that stay open; the one that was used longest ago is closed first."""
_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@command()
def ui(
    *,
    path: Annotated[
        Path, "A folder of traces, one trace file, or a store of runs; also URLs.", Positional("RUN|STORE")
    ],
    port: Annotated[
        int, "Port of 127.0.0.1; 0: any free port.", Flag(type=click.IntRange(0, 65535), metavar="PORT")
    ] = 0,
    browser: Annotated[bool, "Open the page in a browser."] = True,
    run: RunOptions,
) -> None:
    """Show the page of a run, or of the runs of a store, from a server: all events of all ranks.

    The file of `etloom report` has up to 200,000 events of a rank, and 64 ranks; this page asks its server for the
    events in view. The server listens on 127.0.0.1 and answers only requests with the address that it prints. Ctrl-C
    ends it.

    Examples:

    \b
      etloom ui run/
      etloom ui store/
      etloom ui run/ --port 8765 --no-browser    # on another machine: ssh -L 8765:localhost:8765 HOST
    """
    if port:
        check_port(port, "--port")
    with PageServer(port, RunPages(path, run)) as server:
        click.echo(server.url)
        print_message("serving the page at this address; Ctrl-C ends it")
        if browser:
            threading.Thread(target=webbrowser.open, args=[server.url], daemon=True).start()
        status: Any = 0
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        except SystemExit as signaled:
            status = signaled.code
        atexit._run_exitfuncs()
        os._exit(status)  # without waiting for the threads that compute the summary


class RunPages:
    """The runs that a server shows: one, or those of a store, each opened when its page is asked for.

    Args:
        path: a run, or a store.
        options: options for opening runs.
    """

    def __init__(self, path: Path, options: RunOptions) -> None:
        self._path, self._options = path, options
        self._opened: OrderedDict[str, tuple[ServedRun, tuple[int, ...]]] = OrderedDict()
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._only = ""
        if len(names := _list_names(path)) == 1:
            self._only = names[0]
            self._open(self._only)

    def answer(self, place: Sequence[str], arguments: Mapping[str, str]) -> tuple[str, bytes]:
        """Return the type and the content of the answer to a request.

        Args:
            place: the parts of the address after the token: of a store the name of a run, then a question of
                `ServedRun.answer`, or an empty text for a page.
            arguments: of the question.

        Raises:
            EtloomError: the address is wrong, or the run cannot be read.
        """
        *parts, question = place
        name = "/".join(parts)
        if not (name or question):
            if len(names := _list_names(self._path)) > 1:
                return _HTML, _render_store(self._path).encode()
            self._only = names[0]
        run = self._open(name or self._only)
        if not question:
            return _HTML, run.render().encode()
        content = run.answer(question, arguments)
        if isinstance(content, bytes):
            return "application/octet-stream", content
        return "application/json", content.encode()

    def _open(self, name: str) -> ServedRun:
        """Return the opened run with a name of the store; an empty name stands for the only run.

        A run that has been replaced since is opened again.
        """
        from etloom.reports.served_run import ServedRun

        folder = _find_folder(self._path, name)
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            version = _read_version(folder)
            run, opened = self._opened.get(name, (None, ()))
            if run is None or opened != version:
                job = open_job(folder, self._options, for_report=True)
                check_readable(job, folder)
                run = ServedRun(job)
                for rank in run.list_first_ranks():
                    run.open_rank(rank)
                threading.Thread(target=run.summarize, daemon=True).start()
            with self._lock:
                self._opened[name] = run, version
                self._opened.move_to_end(name)
                if len(self._opened) > MAX_OPEN_RUNS:
                    self._opened.popitem(last=False)
            return run


def _list_names(path: Path) -> list[str]:
    """Return the names of the runs of a store; an empty one for a run, and for a store without runs."""
    from etloom.formats.parquet.store_layout import is_store, list_runs

    return (list_runs(path) if is_store(path) else []) or [""]


def _find_folder(path: Path, name: str) -> Path:
    """Return the folder of a run of a store, or the run itself. Raises EtloomError if the run does not exist."""
    from etloom.formats.parquet.store_layout import check_name, is_store, is_stored_run, run_folder

    if not name and (not is_store(path) or _list_names(path) == [""]):
        return path
    if not is_store(path) or not name or not is_stored_run(folder := run_folder(path, check_name(name))):
        raise EtloomError(f"unknown run {name!r}")
    return folder


def _read_version(folder: Path) -> tuple[int, ...]:
    """Return what changes when a stored run is replaced; nothing for a folder of traces."""
    try:
        facts = (folder / "meta.json").stat()
    except OSError:
        return ()
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _render_store(path: Path) -> str:
    import etloom
    from etloom.reports.store_page import render_runs

    return render_runs(path.name, etloom.store_list(path))


class PageServer(ThreadingHTTPServer):
    """A server of 127.0.0.1 whose addresses begin with a secret token.

    Args:
        port: the port; 0 for any free one.
        pages: answers the requests.
    """

    daemon_threads = True

    def __init__(self, port: int, pages: RunPages) -> None:
        super().__init__((HOST, port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self.url = f"http://{HOST}:{self.server_port}/{self.token}/"
        self._pages = pages

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing if a browser closes its connection before the answer is complete."""

    def answer(self, address: str, headers: Message) -> tuple[HTTPStatus, str, bytes]:
        """Return status, type and content of the answer to a request."""
        hosts, origins = headers.get_all("Host", []), headers.get_all("Origin", [])
        if len(hosts) != 1 or hosts[0] not in list_hosts(self.server_port):
            return HTTPStatus.MISDIRECTED_REQUEST, _TEXT, b"wrong Host"
        if any(origin not in list_origins(self.server_port) for origin in origins):
            return HTTPStatus.FORBIDDEN, _TEXT, b"wrong Origin"
        try:
            url = urlsplit(address)
            token, *place = url.path.removeprefix("/").split("/")
            if not place or not secrets.compare_digest(token.encode(), self.token.encode()):
                return HTTPStatus.FORBIDDEN, _TEXT, b"wrong address: open the one that etloom ui prints"
            return HTTPStatus.OK, *self._pages.answer(place, dict(parse_qsl(url.query, max_num_fields=20)))
        except EtloomError as error:
            problem = str(error)
        except Exception as error:  # the next request may be answered
            problem = f"internal error: {type(error).__name__}: {error}"
        return HTTPStatus.BAD_REQUEST, _TEXT, make_printable(redact(problem)).encode()


class _Handler(BaseHTTPRequestHandler):
    """Answers GET; the base class refuses other methods."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "etloom", ""
    timeout = 60

    def do_GET(self) -> None:
        status, kind, content = self.server.answer(self.path, self.headers)
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Write no line for each request."""
