"""mlcommons/chakra's ``chakra_jsonizer``: a .et as JSON. One valid object, numbers as numbers, unlike the peer's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from etloom.compat._command import run_command
from etloom.exports import chakra_json


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_jsonizer``: exit status 0, 1 for an error told in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="chakra_jsonizer", description="Write a Chakra trace as JSON.")
    parser.add_argument("--input_filename", required=True, help="the .et")
    parser.add_argument(
        "--output_filename", required=True, help="the JSON to write; packed where it ends in .gz"
    )
    given = parser.parse_args(arguments)
    paths = Path(given.input_filename), Path(given.output_filename)
    return run_command("chakra_jsonizer", lambda: chakra_json.convert_messages(*paths))
