"""Find the traces that recorded the capture of device graphs (CUDA graphs), in a folder next to a trace."""

from __future__ import annotations

from pathlib import Path

from etloom.core.errors import EtloomError
from etloom.formats import detect_format, kineto
from etloom.loading.file_names import CAPTURE_FOLDER, find_rank_in_name
from etloom.loading.folder_contents import list_files


def find_captures(path: Path) -> list[Path]:
    """Return the traces of CUDA graph captures in ``capture_traces``, a subfolder of a folder or next to a trace file.

    Next to a single trace, those whose names have the number of another rank are left out.
    """
    folder = (path if path.is_dir() else path.parent) / CAPTURE_FOLDER
    if path.parent.name == CAPTURE_FOLDER or not folder.is_dir() or not path.exists():
        return []
    files = [
        file for file in list_files(folder) if ".json" in file.name and file.is_file() and _is_kineto(file)
    ]
    numbers = {file: find_rank_in_name(file) for file in files}
    if path.is_dir() or len({number for number in numbers.values() if number is not None}) < 2:
        return files
    rank = find_rank_in_name(path)
    if rank is None and _is_kineto(path):
        rank = kineto.find_rank(path)
    return [file for file, number in numbers.items() if rank is None or number in (None, rank)]


def _is_kineto(path: Path) -> bool:
    try:
        return detect_format(path) == "kineto"
    except EtloomError:
        return False
