"""Kineto's argument names in Python and in the native parser are the same."""

from __future__ import annotations

import re

from etloom.formats.kineto.event_json import ARGUMENT_NAMES, MEMORY_ARGUMENT_NAMES
from support.paths import ROOT

_TABLES = {
    "kEvent": "events",
    "kArguments": "arguments",
    "kKernel": "kernels",
    "kSync": "syncs",
    "kFrame": "frames",
    "kComm": "comms",
    "kMemory": "memory",
}
_FIELD = re.compile(r'\{"([^"]+)", "(\w+)", Group::(\w+), Kind::\w+')


def test_the_writer_names_arguments_as_the_native_parser_reads_them() -> None:
    header = (ROOT / "native" / "parse" / "kineto_fields.hpp").read_text(encoding="utf-8")
    native: dict[str, dict[str, str]] = {}
    for name, column, group in _FIELD.findall(header):
        native.setdefault(_TABLES[group], {})[column] = name
    assert native == {**ARGUMENT_NAMES, "memory": MEMORY_ARGUMENT_NAMES}
