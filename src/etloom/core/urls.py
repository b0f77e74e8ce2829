"""URLs of object stores, which users may write instead of paths; credentials are removed from them.

A URL is cleaned where it enters (a flag, an argument of a verb): user, password and query are remembered for the
connection only, so nothing that is printed, logged, stored or named after a URL can contain them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath
from urllib.parse import parse_qsl, quote, unquote

_URL = re.compile(r"([a-z][a-z0-9+.-]+):(/+)(.*)", re.DOTALL)
_QUERY = re.compile(r"\?((?:[\w.-]+=[^&]*)(?:&[\w.-]+=[^&]*)*)$")
_SINGLE_SLASH = re.compile(r"^([a-z][a-z0-9+.-]+):/(?!/)")
_SECRET_NAMES = re.compile(r"(?i)secret|token|password|access_key|account_key|sas|credential")
_SECRET_VARIABLES = re.compile(
    r"(?i)^(?:AWS|GOOGLE|GCS|AZURE|FSSPEC|HADOOP)_\w*(?:KEY|SECRET|TOKEN|PASSWORD)\w*$"
)
_MIN_SECRET = 6
"""Shorter values are not masked: they occur in other words."""
DEFAULT_HOST = "default"
"""Host of hdfs:///path: that of the configuration of Hadoop."""

_connections: dict[str, tuple[str, str]] = {}
"""scheme://host -> user information and query of the last URL with any."""
_origins: dict[str, str] = {}
"""Local folder -> URL whose files it holds."""


class UrlPath(PosixPath):
    """A Path that holds a URL without credentials; its text has both slashes of ``s3://``."""

    def __str__(self) -> str:
        return _SINGLE_SLASH.sub(r"\1://", super().__str__())

    def __fspath__(self) -> str:
        return str(self)


def clean_url(path: str | os.PathLike[str]) -> str | None:
    """Return a URL without credentials and query, and remember these in this process; None for a local path.

    `Path` removes one of the two slashes of a URL; such a path is recognized, too.
    """
    text = os.fspath(path)
    match = _URL.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    scheme, slashes, rest = match.groups()
    if scheme == "file":
        return None
    query = _QUERY.search(rest)
    rest = rest[: query.start()] if query else rest
    host, separator, key = rest.partition("/")
    if len(slashes) > 2:  # hdfs:///path
        host, separator, key = DEFAULT_HOST, "/", rest
    user, _, host = host.rpartition("@")
    base = f"{scheme}://{host}"
    _connections.setdefault(base, ("", ""))
    if user or query:
        _connections[base] = (user, query[1] if query else "")
    return f"{base}{separator}{key}".rstrip("/")


def as_path(path: str | os.PathLike[str]) -> Path:
    """Convert a URL to a UrlPath without credentials, a file:// URL to a local Path, and any other path to a Path."""
    url = clean_url(path)
    if url is not None:
        return UrlPath(url)
    text = os.fspath(path)
    return Path("/" + text[5:].lstrip("/")) if text.startswith("file:/") else Path(path)


def connection_of(url: str) -> tuple[str, str]:
    """Return the user information and query last specified for a URL's host; empty texts if there were none."""
    scheme, _, rest = url.partition("://")
    return _connections.get(f"{scheme}://{rest.partition('/')[0]}", ("", ""))


def register_origin(folder: Path, url: str) -> None:
    """Remember that a local folder holds copies of files at a URL, so that messages name the URL."""
    _origins[str(folder)] = url


def forget_origin(folder: Path) -> None:
    """Undo `register_origin` for a folder that was removed."""
    _origins.pop(str(folder), None)


def describe_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text for users: a local copy of a URL has the name of the URL."""
    return redact(str(path))


def redact(text: str) -> str:
    """Return a message with paths of local copies replaced by their URLs, and credentials replaced by ``***``."""
    for folder, url in _origins.items():
        text = text.replace(folder, url)
    for secret in _list_secrets():
        text = text.replace(secret, "***")
    return text


def _list_secrets() -> list[str]:
    """Return the credentials that this process knows, the longest first; empty before it has seen a URL."""
    if not _connections:
        return []
    values = [value for name, value in os.environ.items() if _SECRET_VARIABLES.match(name)]
    for user, query in _connections.values():
        values += [part for text in user.split(":") for part in (text, unquote(text)) if ":" in user]
        for name, value in parse_qsl(query):
            if _SECRET_NAMES.search(name):
                values += [value, quote(value, safe="")]
    return sorted({value for value in values if len(value) >= _MIN_SECRET}, key=len, reverse=True)
