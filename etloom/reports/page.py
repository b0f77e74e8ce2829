"""A page put together: the files beside this one, a template filled in, and the policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def read_asset(name: str) -> str:
    return resources.files("etloom.reports").joinpath(name).read_text(encoding="utf-8")


def fill_template(template: str, **parts: str) -> str:
    """The template with each {{name}} replaced, in one pass: what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def content_security_policy(css: str, script: str) -> str:
    """The content security policy of a page with this very style and script and nothing else."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(css)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
