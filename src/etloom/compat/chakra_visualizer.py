"""The command ``chakra_visualizer`` of mlcommons/chakra: draws a .et file as .dot, .graphml or (with Graphviz) .pdf."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from etloom.compat._command import run_command
from etloom.core.errors import EtloomError
from etloom.core.paths import expand_home
from etloom.formats.chakra.et_files import ChakraNode, load_file
from etloom.formats.io.atomic_file import write_atomically

_ARROWS = {"data": "normal", "control": "tee"}


def visualize(source: Path, target: Path) -> None:
    """Write the node graph of a .et file as .dot, .graphml or .pdf, depending on the suffix of ``target``.

    Raises ReadError, EtloomError.
    """
    nodes = load_file(source).nodes
    if target.suffix == ".graphml":
        write_atomically(target, "".join(_graphml(nodes)))
    elif target.suffix == ".dot":
        write_atomically(target, "".join(_dot(nodes)))
    elif target.suffix == ".pdf":
        program = shutil.which("dot")
        if program is None:
            raise EtloomError(
                "a .pdf requires Graphviz, which is not installed", where=target, remedy="write a .dot file"
            )
        dot_text = "".join(_dot(nodes)).encode()
        process = subprocess.run(
            [program, "-Tpdf", "-o", str(target)], input=dot_text, capture_output=True, check=False
        )
        if process.returncode:
            message = process.stderr.decode(errors="replace").strip().partition("\n")[0]
            raise EtloomError(f"Graphviz failed: {message}", where=target, remedy="write a .dot file")
    else:
        raise EtloomError(
            f"unknown format {target.suffix!r}", where=target, remedy="end it in .dot, .graphml or .pdf"
        )


def _edges(nodes: list[ChakraNode]) -> Iterator[tuple[int, int, str]]:
    for node in nodes:
        yield from ((on, node.id, "data") for on in node.message.data_deps)
        yield from ((on, node.id, "control") for on in node.message.ctrl_deps)


def _dot(nodes: list[ChakraNode]) -> Iterator[str]:
    yield "digraph chakra {\n"
    for node in nodes:
        label = node.name.replace("\\", "\\\\").replace('"', '\\"')
        yield f'  {node.id} [label="{label}"];\n'
    yield from (
        f"  {source} -> {target} [arrowhead={_ARROWS[kind]}];\n" for source, target, kind in _edges(nodes)
    )
    yield "}\n"


def _graphml(nodes: list[ChakraNode]) -> Iterator[str]:
    yield '<?xml version="1.0" encoding="UTF-8"?>\n<graphml xmlns="http://graphml.graphdrawing.org/xmlns">\n'
    yield '<key id="label" for="node" attr.name="label" attr.type="string"/>\n'
    yield '<key id="dependency" for="edge" attr.name="dependency" attr.type="string"/>\n'
    yield '<graph id="chakra" edgedefault="directed">\n'
    for node in nodes:
        name = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in node.name)
        yield f'<node id="{node.id}"><data key="label">{escape(name)}</data></node>\n'
    for source, target, kind in _edges(nodes):
        yield f'<edge source="{source}" target="{target}"><data key="dependency">{kind}</data></edge>\n'
    yield "</graph>\n</graphml>\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``chakra_visualizer``: exit status 0, 1 for an error reported in one line, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="chakra_visualizer", description="Draw the nodes of a Chakra trace."
    )
    parser.add_argument("--input_filename", required=True, help="the .et")
    parser.add_argument("--output_filename", required=True, help="the file to write: .dot, .graphml or .pdf")
    args = parser.parse_args(arguments)
    paths = expand_home(args.input_filename), expand_home(args.output_filename)
    return run_command("chakra_visualizer", lambda: visualize(*paths))
