"""The command ``chakra_jsonizer`` of mlcommons/chakra: a .et as JSON. Unlike the peer's output, it is one valid
object and numbers are numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from etloom.compat._command import run_command
from etloom.exports import chakra_json


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_jsonizer``: exit status 0, 1 for an error reported in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="chakra_jsonizer", description="Write a Chakra trace as JSON.")
    parser.add_argument("--input_filename", required=True, help="the .et")
    parser.add_argument(
        "--output_filename", required=True, help="the JSON to write; packed where it ends in .gz"
    )
    args = parser.parse_args(arguments)
    paths = Path(args.input_filename), Path(args.output_filename)
    return run_command("chakra_jsonizer", lambda: chakra_json.convert_messages(*paths))
