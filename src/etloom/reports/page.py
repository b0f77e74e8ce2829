"""Assembles an HTML page from a template; its content security policy allows only its style and script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import NamedTuple

from etloom.core.version import __version__

_SELF_CONTAINED = "This file is self-contained: it loads nothing and sends nothing."
TIMELINE_SCRIPTS = (
    "data.js",
    "path.js",
    "paint.js",
    "timeline.js",
    "views.js",
    "calls.js",
    "selection.js",
    "address.js",
)
"""The first scripts of a page with timelines."""


class Section(NamedTuple):
    """A section of an HTML page: its id, the text of the link to it, and its HTML."""

    id: str
    link: str
    html: str


@dataclass(frozen=True)
class Page:
    """The contents of an HTML page. ``subtitle``, ``summary``, ``sections`` and ``data`` are HTML, the other fields
    plain text.

    ``scripts``: names of the JavaScript files next to this module, in order. ``data``: script elements with data.
    ``asks_server``: whether its script asks the server that the page comes from.
    """

    title: str
    heading: str
    subtitle: str
    summary: str
    sections: Sequence[Section]
    scripts: Sequence[str]
    data: str = ""
    asks_server: bool = False

    def render(self) -> str:
        """Return the page as HTML."""
        css, script = read_asset("report.css"), "\n".join(map(read_asset, self.scripts))
        return fill_template(
            read_asset("page.html"),
            csp=content_security_policy(css, script, asks_server=self.asks_server),
            title=escape(self.title),
            heading=escape(self.heading),
            subtitle=self.subtitle,
            css=css,
            summary=self.summary,
            links="".join(f'<a href="#{section.id}">{section.link}</a>' for section in self.sections),
            sections="\n".join(section.html for section in self.sections),
            version=escape(__version__),
            origin="Its server runs on this machine." if self.asks_server else _SELF_CONTAINED,
            data=self.data,
            script=script,
        )


@dataclass(frozen=True)
class NotebookPage:
    """A page that a notebook shows in its output, in a frame of its own; works offline.

    Attributes:
        html: the page.
        height: of the frame, in pixels.
    """

    html: str
    height: int

    def _repr_html_(self) -> str:
        """Return the frame; its scripts reach neither the notebook nor the network."""
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" width="100%" height="{self.height}" '
            'style="border: 0" title="etloom"></iframe>'
        )


def titled_section(name: str, link: str, html: str, title: str | None = None) -> Section:
    """Return a page section with a heading above ``html``: ``title``, by default the text of the link."""
    return Section(
        name,
        link,
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(title or link)}</h2>\n'
        f"{html}\n</section>",
    )


def read_asset(name: str) -> str:
    """Return the text of a file next to this module."""
    return resources.files("etloom.reports").joinpath(name).read_text(encoding="utf-8")


def fill_template(template: str, **parts: str) -> str:
    """Replace each {{name}} in a template by the text of that name; inserted texts are not searched again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def content_security_policy(css: str, script: str, *, asks_server: bool = False) -> str:
    """Return a content security policy that allows only the style ``css`` and the script ``script``, by hash, and
    requests to the server of the page, if it has one."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    connect = "connect-src 'self'; " if asks_server else ""
    return (
        f"default-src 'none'; {connect}script-src {digest(script)}; style-src {digest(css)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
