"""A small S3 server on loopback: what pyarrow's client needs, with failures on demand."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCESS_KEY = "AKIATESTETLOOM000000"
SECRET_KEY = "an-unmistakable-secret-of-the-tests"


class S3Server:
    """Buckets in memory.

    Attributes:
        objects: "bucket/key" -> content and time of change in ms.
        buckets: names of the buckets.
        fault: what is wrong with all downloads: short (50 bytes are missing, also in the stated length), flipped (one
            byte is another), slow (a byte a second), garbage (no HTTP).
        hash_etag: the hash function of ETags.
        cuts: number of downloads whose connection is cut in the middle.
        refused_uploads: number of writes that are answered with an error of the server.
        requests: number of requests by method and key.
        order: keys in the order in which they were written.
        page_size: number of keys in an answer to a listing.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.buckets = {"bucket"}
        self.fault = ""
        self.hash_etag: Callable[[bytes], Any] = hashlib.md5
        self.cuts = 0
        self.refused_uploads = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        self.order: list[str] = []
        self.page_size = 1000
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self.arrived = threading.Condition()
        self.url = ""

    def put(self, key: str, content: bytes) -> None:
        with self.lock:
            last = self.objects.get(key, (b"", 0))[1]
            self.objects[key] = content, max(int(time.time() * 1000), last + 1)
            self.order.append(key)
        with self.arrived:
            self.arrived.notify_all()

    def wait_for(self, key: str) -> bool:
        """Wait until an object exists; return whether it does, after five minutes at the latest."""
        with self.arrived:
            return self.arrived.wait_for(lambda: key in self.objects, timeout=300)

    def take(self, counter: str) -> bool:
        with self.lock:
            left = getattr(self, counter)
            setattr(self, counter, max(left - 1, 0))
            return bool(left)

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))


@contextmanager
def serve_s3() -> Iterator[S3Server]:
    """Run a server on a free port of the loopback interface."""
    state = S3Server()
    handler = type("Handler", (_Handler,), {"state": state})
    server = _Server(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Print nothing: the client is gone."""

    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: S3Server

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode())

    def _parse(self) -> tuple[str, str, dict[str, str]] | None:
        """Return bucket, key and query of an authorized request to an existing bucket."""
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        with self.state.lock:
            self.state.requests[self.command, key] += 1
        self.body = self._read_body()
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self._refuse(403, "AccessDenied")
            return None
        if bucket not in self.state.buckets:
            self._refuse(404, "NoSuchBucket")
            return None
        return bucket, key, query

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._read_chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return _decode_aws_chunks(body) if self.headers.get("Content-Encoding") == "aws-chunked" else body

    def _read_chunk(self) -> bytes:
        chunk = self.rfile.read(int(self.rfile.readline().partition(b";")[0], 16))
        self.rfile.readline()
        return chunk

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if (request := self._parse()) is None:
            return
        bucket, key, query = request
        if not key:
            if self.command == "HEAD":
                self._answer(200)
            else:
                self._list(bucket, query)
            return
        entry = self.state.objects.get(f"{bucket}/{key}")
        if entry is None:
            self._refuse(404, "NoSuchKey")
            return
        content, changed = entry
        headers = {"Last_Modified": formatdate(changed // 1000, usegmt=True), "ETag": self._etag(content)}
        status, span = 200, self.headers.get("Range")
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else len(content), len(content))
            headers["Content_Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            status, content = 206, content[int(first) : end]
        if self.command == "GET" and self.state.take("cuts"):
            self._answer(status, content[: len(content) // 2], Content_Length=str(len(content)), **headers)
            self.close_connection = True
            return
        if self.command == "GET" and self.state.fault:
            content = self._spoil(content)
        self._answer(status, content, Content_Length=str(len(content)), **headers)

    def _spoil(self, content: bytes) -> bytes:
        if self.state.fault == "garbage":
            self.wfile.write(b"no HTTP\r\n" * 100)
            self.close_connection = True
        elif self.state.fault == "slow":
            self.wfile.write(b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4000\r\n\r\n")
            for _ in range(60):
                self.wfile.write(b"x")
                time.sleep(1)
        elif self.state.fault == "flipped":
            return bytes([content[0] ^ 1]) + content[1:]
        return content[:-50]

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names: dict[str, str | None] = {}
        for full in self.state.keys(f"{bucket}/{prefix}"):
            key = full.removeprefix(f"{bucket}/")
            rest = key.removeprefix(prefix)
            if delimiter and delimiter in rest:
                names.setdefault(prefix + rest.partition(delimiter)[0] + delimiter, None)
            else:
                names[key] = full
        limit, start = self.state.page_size, int(query.get("continuation-token", 0))
        page = list(names.items())[start : start + limit]
        is_cut = start + limit < len(names)
        body = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            if full is None
            else self._describe(name, full)
            for name, full in page
        )
        token = f"<NextContinuationToken>{start + limit}</NextContinuationToken>" if is_cut else ""
        self._answer(
            200,
            f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"
            f"{token}{body}</ListBucketResult>".encode(),
        )

    def _describe(self, name: str, full: str) -> str:
        content, changed = self.state.objects[full]
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(changed // 1000))
        stamp = f"{seconds}.{changed % 1000:03}Z"
        return (
            f"<Contents><Key>{escape(name)}</Key><LastModified>{stamp}</LastModified>"
            f"<ETag>{self._etag(content)}</ETag><Size>{len(content)}</Size></Contents>"
        )

    def do_PUT(self) -> None:
        if (request := self._parse()) is None:
            return
        bucket, key, query = request
        if self.state.take("refused_uploads"):
            self._refuse(503, "ServiceUnavailable")
        elif "uploadId" in query:
            with self.state.lock:
                self.state.uploads[query["uploadId"]][int(query["partNumber"])] = self.body
            self._answer(200, ETag=self._etag(self.body))
        else:
            self.state.put(f"{bucket}/{key}", self.body)
            self._answer(200, ETag=self._etag(self.body))

    def do_POST(self) -> None:
        if (request := self._parse()) is None:
            return
        bucket, key, query = request
        if "uploads" in query:
            with self.state.lock:
                number = f"upload-{len(self.state.uploads)}"
                self.state.uploads[number] = {}
            self._answer(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId>"
                "</InitiateMultipartUploadResult>".encode(),
            )
        else:
            with self.state.lock:
                parts = self.state.uploads[query["uploadId"]]
            content = b"".join(content for _, content in sorted(parts.items()))
            self.state.put(f"{bucket}/{key}", content)
            self._answer(
                200,
                f"<CompleteMultipartUploadResult><ETag>{self._etag(content)}</ETag>"
                "</CompleteMultipartUploadResult>".encode(),
            )

    def _etag(self, content: bytes) -> str:
        return f'"{self.state.hash_etag(content).hexdigest()}"'

    def do_DELETE(self) -> None:
        if (request := self._parse()) is None:
            return
        bucket, key, _ = request
        with self.state.lock:
            self.state.objects.pop(f"{bucket}/{key}", None)
        self._answer(204)


def _decode_aws_chunks(body: bytes) -> bytes:
    """Return the content of a body in chunks of the SDK, which end with checksums."""
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        length = int(body[at:end].partition(b";")[0], 16)
        if length == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + length])
        at = end + 4 + length
