"""Connections to object stores: one interface, over pyarrow's file systems (s3, gs, hdfs) or fsspec's (any other URL).

Every exception of a library becomes an EtloomError of one line, without credentials. The connections retry requests
that were refused for load; `etloom.formats.io.transfers` retries what was cut.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from etloom.core.errors import EtloomError, ReadError
from etloom.core.urls import connection_of

_HADOOP = ("hdfs", "viewfs")
_ARROW = ("s3", "gs", *_HADOOP)
_NS = 10**9
_S3_OPTIONS = ("region", "scheme", "endpoint_override", "access_key", "secret_key", "session_token")
_BLOCK_BYTES = 8 << 20
REQUEST_S = 60.0
"""Time limit of a request, without the time for its bytes at `_SLOWEST_BYTES_S` per second."""
_SLOWEST_BYTES_S = 20_000


@dataclass(frozen=True)
class RemoteFile:
    """A file in an object store: key, size in bytes, a stamp in ns that differs after a change (time, ETag), and MD5.

    The MD5 (hexadecimal) is empty if it is unknown. The ETag of an object that was uploaded in one part is its MD5,
    unless the store encrypts it with a key of its own (KMS).
    """

    key: str
    size: int
    stamp_ns: int
    md5: str = ""


class TransientError(ReadError):
    """Raised when a connection is cut or refused, so that the request may succeed when it is repeated."""


class StalledRequest(TransientError):
    """Raised when a request got no complete answer in its time."""


class ObjectStore(Protocol):
    """A connection to an object store; keys are paths that begin with the bucket. Raises ReadError or EtloomError."""

    def list_folder(self, key: str) -> tuple[list[RemoteFile], list[str]]:
        """Return the files directly in a folder, and the keys of its subfolders."""
        ...

    def list_tree(self, key: str) -> list[RemoteFile]:
        """Return all files in a folder and in its subfolders."""
        ...

    def find(self, key: str) -> RemoteFile | None:
        """Return key, size and stamp of a file; None if it does not exist."""
        ...

    def has_bucket(self, key: str) -> bool:
        """Return whether the bucket of a key exists; true if the store has no buckets."""
        ...

    def read_range(self, key: str, start: int, length: int) -> tuple[bytes, str]:
        """Return ``length`` bytes of a file from the byte offset ``start``, and the file's MD5 or an empty text."""
        ...

    def upload(self, source: Path, key: str) -> None:
        """Upload a local file as the object with this key."""
        ...

    def delete(self, key: str) -> None:
        """Delete a file, if it exists."""
        ...


def split_url(url: str) -> tuple[str, str]:
    """Split a URL without credentials into prefix (``s3://``, ``hdfs://host``) and key (``bucket/path``, ``/path``)."""
    scheme, _, rest = url.partition("://")
    if scheme in _HADOOP:
        host, separator, path = rest.partition("/")
        return f"{scheme}://{host}", separator + path or "/"
    return f"{scheme}://", rest


def connect(url: str) -> ObjectStore:
    """Return the connection to the object store of a URL, with the credentials and options the user specified.

    Raises:
        EtloomError: the URL's kind is not supported or needs a package, or options in the URL are invalid.
    """
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0]
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    store = _BoundedStore(_connect(scheme, host, *connection_of(url), endpoint), split_url(url)[0])
    return cast("ObjectStore", store)


class _BoundedStore:
    """An `ObjectStore` whose requests end after a time that depends on their size, even if the server sends slowly.

    The thread of a request that takes longer ends with the process.
    """

    def __init__(self, store: ObjectStore, base: str) -> None:
        self._store = store
        self._base = base

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)

        def request(*words: Any) -> Any:
            source = next((word for word in words if isinstance(word, Path)), None)
            size = source.stat().st_size if source else words[2] if name == "read_range" else 0
            url = f"{self._base}{words[1] if source else words[0]}"
            try:
                return _run_within(REQUEST_S + size / _SLOWEST_BYTES_S, partial(method, *words), url)
            except StalledRequest as error:
                if name not in ("upload", "delete"):
                    raise
                # Its thread may still succeed, after what a repeated request wrote.
                raise ReadError(error.what, where=url, remedy="check the network, and try again") from None

        return request


def _run_within(seconds: float, action: Callable[[], Any], url: str) -> Any:
    result: Future[Any] = Future()

    def work() -> None:
        try:
            result.set_result(action())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=work, daemon=True, name="etloom-request").start()
    try:
        return result.result(seconds)
    except TimeoutError:
        if "pyarrow.fs" in sys.modules:  # it would wait for the request at the end of the process
            atexit.unregister(sys.modules["pyarrow.fs"].ensure_s3_finalized)
        raise StalledRequest(
            f"the answer is not complete after {seconds:.0f} s",
            where=url,
        ) from None


@lru_cache(maxsize=64)
def _connect(scheme: str, host: str, user: str, query: str, endpoint: str) -> ObjectStore:
    base = split_url(f"{scheme}://{host}")[0]
    address = f"{scheme}://{user}{'@' if user else ''}{host}"
    with convert_errors(f"{scheme}://{host}"):
        if scheme == "s3":
            return _ArrowStore(_connect_s3(host, user, query, endpoint), base)
        if scheme in _ARROW:
            from pyarrow import fs

            return _ArrowStore(fs.FileSystem.from_uri(f"{address}/{'?' if query else ''}{query}")[0], base)
        return _FsspecStore(_connect_fsspec(scheme, address, query), base)


def _connect_fsspec(scheme: str, address: str, query: str) -> Any:
    """Return fsspec's file system for a URL that pyarrow does not support; the URL's query holds its options."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise EtloomError(
            f"{scheme}:// needs fsspec, which is not installed", remedy="pip install 'etloom[remote]'"
        ) from None
    try:
        return url_to_fs(address, **dict(parse_qsl(query)))[0]
    except ImportError as error:
        raise EtloomError(
            f"{scheme}:// needs a package that is not installed: {error}", remedy="install it with pip"
        ) from None
    except ValueError as error:
        raise EtloomError(
            f"{scheme}:// cannot be opened: {error}",
            remedy="expected a path, s3://, gs://, hdfs:// or another URL of fsspec",
        ) from None


def _connect_s3(bucket: str, user: str, query: str, endpoint: str) -> Any:
    """Return pyarrow's S3 file system, configured by the URL's options, else by environment variables."""
    from pyarrow import fs

    options: dict[str, Any] = dict(parse_qsl(query))
    anonymous = options.pop("anonymous", "false").lower() in ("true", "1")
    if unknown := sorted(set(options) - set(_S3_OPTIONS)):
        raise EtloomError(
            f"unknown option {unknown[0]!r} in the URL",
            remedy=f"expected one of anonymous, {', '.join(_S3_OPTIONS[:3])}",
        )
    if ":" in user:
        options["access_key"], options["secret_key"] = (unquote(part) for part in user.split(":", 1))
    if endpoint and "endpoint_override" not in options:
        address = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        options["endpoint_override"], options["scheme"] = address.netloc, address.scheme
    options.setdefault("region", os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"))
    if options["region"] is None and options.get("endpoint_override"):
        options["region"] = "us-east-1"
    elif options["region"] is None:
        with contextlib.suppress(OSError):
            options["region"] = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        anonymous=anonymous,
        allow_delayed_open=True,  # one request for a small file
        connect_timeout=10,
        request_timeout=60,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=3),
        **options,
    )


class _ArrowStore:
    """An `ObjectStore` that uses a pyarrow file system, whose requests release Python's global lock."""

    def __init__(self, fs: Any, base: str) -> None:
        self._fs = fs
        self._base = base

    def _list(self, key: str, recursive: bool) -> list[Any]:
        from pyarrow.fs import FileSelector

        with convert_errors(self._url(key)):
            entries: list[Any] = self._fs.get_file_info(
                FileSelector(key, allow_not_found=True, recursive=recursive)
            )
        return entries

    def list_folder(self, key: str) -> tuple[list[RemoteFile], list[str]]:
        entries = self._list(key, recursive=False)
        return (
            [_from_arrow(entry) for entry in entries if entry.is_file],
            [entry.path for entry in entries if not entry.is_file],
        )

    def list_tree(self, key: str) -> list[RemoteFile]:
        return [_from_arrow(entry) for entry in self._list(key, recursive=True) if entry.is_file]

    def find(self, key: str) -> RemoteFile | None:
        with convert_errors(self._url(key)):
            entry = self._fs.get_file_info(key)
        return _from_arrow(entry) if entry.is_file else None

    def has_bucket(self, key: str) -> bool:
        from pyarrow.fs import FileType

        bucket = key.partition("/")[0]
        if not bucket:  # of HDFS
            return True
        with convert_errors(self._url(bucket)):
            return bool(self._fs.get_file_info(bucket).type != FileType.NotFound)

    def read_range(self, key: str, start: int, length: int) -> tuple[bytes, str]:
        with convert_errors(self._url(key)), self._fs.open_input_file(key) as file:
            data = bytes(file.read_at(length, start))
            return data, _select_md5((file.metadata() or {}).get("ETag", b"").decode())

    def upload(self, source: Path, key: str) -> None:
        with convert_errors(self._url(key)):
            if key.startswith("/"):  # HDFS, which has folders
                self._fs.create_dir(key.rpartition("/")[0] or "/", recursive=True)
            with source.open("rb") as file, self._fs.open_output_stream(key, compression=None) as stream:
                while block := file.read(_BLOCK_BYTES):
                    stream.write(block)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), convert_errors(self._url(key)):
            if self._fs.get_file_info(key).is_file:
                self._fs.delete_file(key)

    def _url(self, key: str) -> str:
        return f"{self._base}{key}"


def _from_arrow(entry: Any) -> RemoteFile:
    return RemoteFile(entry.path, entry.size or 0, entry.mtime_ns or 0)


class _FsspecStore:
    """An `ObjectStore` that uses a file system of fsspec."""

    def __init__(self, fs: Any, base: str) -> None:
        self._fs = fs
        self._base = base

    def list_folder(self, key: str) -> tuple[list[RemoteFile], list[str]]:
        with convert_errors(self._url(key)):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._path(key), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return [], []
        files = [self._file(entry) for entry in entries if entry["type"] == "file"]
        return (
            [file for file in files if file.key != key],
            [self._key(entry["name"]) for entry in entries if entry["type"] == "directory"],
        )

    def list_tree(self, key: str) -> list[RemoteFile]:
        with convert_errors(self._url(key)):
            self._fs.invalidate_cache()
            entries = self._fs.find(self._path(key), detail=True)
        return [file for file in map(self._file, entries.values()) if file.key != key]

    def find(self, key: str) -> RemoteFile | None:
        with convert_errors(self._url(key)):
            try:
                entry = self._fs.info(self._path(key))
            except FileNotFoundError:
                return None
        return self._file(entry) if entry["type"] == "file" else None

    def has_bucket(self, key: str) -> bool:
        return True

    def read_range(self, key: str, start: int, length: int) -> tuple[bytes, str]:
        with convert_errors(self._url(key)):
            return bytes(self._fs.cat_file(self._path(key), start=start, end=start + length)), ""

    def upload(self, source: Path, key: str) -> None:
        path = self._path(key)
        with convert_errors(self._url(key)):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(source), path)

    def delete(self, key: str) -> None:
        with convert_errors(self._url(key)):
            if self._fs.exists(self._path(key)):
                self._fs.rm_file(self._path(key))

    def _url(self, key: str) -> str:
        return f"{self._base}{key}"

    def _path(self, key: str) -> str:
        return str(self._fs._strip_protocol(self._url(key)))

    def _key(self, name: str) -> str:
        return str(self._fs.unstrip_protocol(name)).partition("://")[2].strip("/")

    def _file(self, entry: dict[str, Any]) -> RemoteFile:
        changed = next((entry[name] for name in ("mtime", "LastModified", "created") if entry.get(name)), 0)
        seconds = changed.timestamp() if hasattr(changed, "timestamp") else changed
        tag = next((str(entry[name]) for name in ("ETag", "etag", "md5", "checksum") if entry.get(name)), "")
        stamp = int(seconds * _NS) if isinstance(seconds, (int, float)) else 0
        if tag:  # in the fraction of the second
            digest = int.from_bytes(hashlib.sha256(tag.encode()).digest()[:8], "big")
            stamp = stamp // _NS * _NS + digest % _NS
        return RemoteFile(self._key(entry["name"]), int(entry.get("size") or 0), stamp, _select_md5(tag))


def _select_md5(tag: str) -> str:
    """Return an ETag if it is an MD5, else an empty text; of an object of several parts it has their number."""
    digest = tag.strip('"').lower()
    return digest if re.fullmatch("[0-9a-f]{32}", digest) else ""


_REFUSALS = (
    (
        r"NO_SUCH_BUCKET|NoSuchBucket|bucket does not exist",
        "no such bucket",
        "check the name",
    ),
    (
        r"INVALID_ACCESS_KEY|InvalidAccessKeyId|SIGNATURE_DOES_NOT_MATCH|SignatureDoesNotMatch",
        "the credentials are not valid",
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    (r"EXPIRED_TOKEN|ExpiredToken|expired", "the credentials have expired", "log in again"),
    (
        r"ACCESS_DENIED|AccessDenied|Forbidden|HTTP status 403|NoCredentials|Could not (?:create|find) .*credential"
        r"|Unauthorized|HTTP status 401",
        "access denied",
        "set the credentials (for s3: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public "
        "bucket add ?anonymous=true to the URL; for gs: GOOGLE_APPLICATION_CREDENTIALS)",
    ),
    (
        r"libhdfs|libjvm|HADOOP_HOME",
        "the client of HDFS is not installed",
        "install Hadoop's libhdfs and Java, and set HADOOP_HOME and CLASSPATH",
    ),
)


@contextlib.contextmanager
def convert_errors(url: str) -> Iterator[None]:
    """Convert exceptions of pyarrow and fsspec to a ReadError of one line that names the URL."""
    try:
        yield
    except (EtloomError, FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, EtloomError):
            raise
        raise ReadError("no such object", where=url, remedy="check the URL") from None
    except PermissionError as error:
        raise _refusal(error, url) or ReadError("access denied", where=url) from None
    except Exception as error:
        # The exceptions of fsspec's file systems have no common class.
        raise _refusal(error, url) or TransientError(_reason(error), where=url) from None


def _refusal(error: Exception, url: str) -> ReadError | None:
    text = f"{type(error).__name__}: {error}"
    for pattern, problem, remedy in _REFUSALS:
        if re.search(pattern, text):
            return ReadError(problem, where=url, remedy=remedy)
    return None


def _reason(error: Exception) -> str:
    """Shorten an error's message to 200 characters; of an error of the AWS SDK, return only the error code and text."""
    text = " ".join(str(error).split()) or type(error).__name__
    cause = re.search(r"AWS Error (\w+)(?: during \w+ operation)?:?\s*(.*)", text)
    return (f"{cause[1]}: {cause[2]}" if cause else text)[:200]
