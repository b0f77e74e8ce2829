"""An S3 server on loopback, as fixture `s3`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etloom.core import urls
from etloom.formats.io import transfers
from support import s3_server
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """An S3 server with one bucket, and the environment of a user of it."""
    with s3_server.serve_s3() as server:
        values = {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "ETLOOM_CACHE": str(tmp_path / "cache"),
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(transfers, "BACKOFF_S", 0.001)
        monkeypatch.setattr(urls, "_connections", {})
        yield server
