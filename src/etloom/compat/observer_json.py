"""Writes what etloom's observer recorded as torch's ExecutionTraceObserver would have: JSON, and files of tensors.

The observer runs `main` in a process of its own for a file whose name ends in .json or .json.gz.
"""

from __future__ import annotations

from pathlib import Path

from etloom.core.errors import EtloomError
from etloom.exports import execution_trace
from etloom.formats import observer


def write_json(recording: Path, output: Path, folder: Path) -> None:
    """Write the JSON of an observer file, name the tensors saved in ``folder`` by its nodes, and delete the recording.

    Raises:
        EtloomError: The recording cannot be read.
        OSError: The file cannot be written.
    """
    trace = observer.read(recording)
    execution_trace.write(trace, output)
    if folder.is_dir():
        nodes = dict(trace.nodes.select("rf_id", "et_id").drop_nulls().iter_rows())
        for saved in list(folder.glob("rf_*_tid_*.dat")):
            _, handle, _, place = saved.stem.split("_")
            if (node := nodes.get(int(handle))) is not None:
                saved.rename(folder / f"nid_{node}_tid_{place}.dat")
    recording.unlink()


def main(recording: str, output: str, folder: str) -> None:
    """Write the JSON; exit with a line that says why, if it cannot be written."""
    try:
        write_json(Path(recording), Path(output), Path(folder))
    except (EtloomError, OSError) as error:
        raise SystemExit(str(error)) from None
