"""The command ``chakra_jsonizer`` of mlcommons/chakra: converts the messages of a .et file to JSON objects.

Names and values are those of the peer (google.protobuf's MessageToJson): durationMicros, attr as a list of typed
values, 64-bit numbers as text. ``etloom convert x.et x.json`` writes one valid object instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import json_format

from etloom.compat._command import run_command
from etloom.core.paths import expand_home
from etloom.formats.chakra.et_files import load_file
from etloom.formats.chakra.protobuf import NODE_TYPES
from etloom.formats.io.atomic_file import open_atomic


def write_objects(source: Path, target: Path) -> None:
    """Write the metadata and all nodes of a .et file as JSON objects. Raises ReadError for other files."""
    with open_atomic(target) as file:
        for text in _format_messages(source):
            file.write(text.encode())


def _format_messages(source: Path) -> Iterator[str]:
    file = load_file(source)
    if file.metadata is not None:
        yield json_format.MessageToJson(file.metadata)
    for node in file.nodes:
        content = json_format.MessageToDict(node.message)
        if "type" in content:  # an enumeration in the schema
            content["type"] = NODE_TYPES.get(content["type"], content["type"])
        yield json.dumps(content, indent=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_jsonizer``: exit status 0, 1 for an error reported in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="chakra_jsonizer", description="Write a Chakra trace as JSON.")
    parser.add_argument("--input_filename", required=True, help="the .et")
    parser.add_argument(
        "--output_filename", required=True, help="the JSON to write; compressed if its name ends in .gz"
    )
    args = parser.parse_args(arguments)
    paths = expand_home(args.input_filename), expand_home(args.output_filename)
    return run_command("chakra_jsonizer", lambda: write_objects(*paths))
