"""Every output is the earlier or the complete new one, whichever write, rename or sync of a command fails."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.examples import is_quick
from support.paths import ROOT
from support.write_faults import Case, build_library, find_violations

_GPU, _DDP = (ROOT / "tests" / "data" / name for name in ("gpu_small", "ddp_2"))
_KINETO, _ET = _GPU / "kineto_trace_0.json.gz", _GPU / "torch_et_0.json.gz"


def _case(text: str, *old: str, before: str = "", **settings: Any) -> Case:
    """Return a case from its command lines, in which ~ is a blank within an argument."""
    words, earlier = ([word.replace("~", " ") for word in line.split()] for line in (text, before))
    return Case(words, old=old, before=earlier, **settings)


def _list_cases(folder: Path) -> list[Case]:
    """Return commands that together write every kind of output."""
    cut, cache = folder / "cut.json", str(folder / "cache")
    cut.write_bytes(gzip.decompress(_KINETO.read_bytes())[:60_000])
    names = f"query {_GPU} select~name~from~events~limit~9 -o OUT/x"
    gather = f"gather {_DDP} --overwrite -o OUT/all"
    return [
        *(_case(f"{names}.{ending}", f"x.{ending}") for ending in ("parquet", "csv")),
        _case(f"report {_GPU} -o OUT/r.html", "r.html"),
        _case(f"info {_GPU} -o OUT/x.json", main="caching_cli", place=cache, is_needed=False),
        _case(f"export {_DDP} -o OUT/x.parquet"),
        _case(f"export {_DDP} -o OUT/x.et", "x.0.et", "x.1.et"),
        _case(f"salvage {cut} -o OUT/s.json.zst", "s.json.zst"),
        _case(gather, before=gather.replace(str(_DDP), str(_GPU))),
    ]


def _list_other_cases(folder: Path) -> list[Case]:
    cut = folder / "cut.json"
    peer = f"--chakra-host-trace {_ET} --chakra-device-trace {_KINETO} --rank 0 --output-file OUT/x.json"
    etplus, et = f"export {_GPU} --to etplus -o OUT/x.json", f"export {_GPU} -o OUT/x.et"
    simulate = f"simulate {_GPU} --set kernel:*~x0.5 -o OUT/s"
    return [
        _case(f"store add {_GPU} --to OUT/store", split=["store"], ignored=["store/.adding"]),
        _case(f"info {_GPU} -o OUT/x.json", "x.json"),
        _case(f"info {_GPU} -f prometheus -o OUT/x.txt", "x.txt"),
        _case(f"diff {_GPU} {_GPU} --html OUT/d.html -o OUT/d.csv", "d.html", "d.csv"),
        _case(f"check {_GPU} --baseline {_GPU} --junit OUT/j.xml", "j.xml"),
        _case(f"{simulate}.json.gz", "s.json.gz"),
        _case(f"{simulate}.parquet", before=f"{simulate}.parquet".replace("x0.5", "x2")),
        _case(f"predict {_DDP} --network 50GB/s -o OUT/p.parquet"),
        _case(f"link {_GPU} -o OUT/l.parquet"),
        _case(f"convert {_KINETO} OUT/c.parquet"),
        _case(f"convert {_KINETO} OUT/c.json.gz", "c.json.gz"),
        *(_case(f"salvage {cut} -o OUT/s.json{ending}", f"s.json{ending}") for ending in ("", ".gz")),
        *(
            _case(f"export {_DDP} -o OUT/x.{ending}", f"x.{ending}")
            for ending in ("json.gz", "json", "folded")
        ),
        _case(f"export {_DDP} -o OUT/x.ccl-bench"),
        _case(etplus, "x.json"),
        _case(f"gather {_DDP} -o OUT/all"),
        _case(f"repro {_DDP} --event 28 -o OUT/r"),
        _case(peer, "x.json", main="etloom.compat.chakra"),
        _case(
            "PyTorch --input OUT/x.json --output OUT/y.et",
            main="etloom.compat.chakra_converter",
            before=etplus,
        ),
        _case(
            "--input_filename OUT/x.0.et --output_filename OUT/y.json",
            main="etloom.compat.chakra_jsonizer",
            before=et,
        ),
        _case(
            "--input_filename OUT/x.0.et --output_filename OUT/y.dot",
            main="etloom.compat.chakra_visualizer",
            before=et,
        ),
    ]


def _assert_atomic(folder: Path, cases: Sequence[Case], is_exhaustive: bool) -> None:
    library = build_library(folder)
    if library is None:
        pytest.skip("needs Linux and a C compiler (cc)")
    assert find_violations(library, folder, cases, is_exhaustive) == []


@pytest.mark.slow
def test_outputs_are_the_earlier_or_the_new_ones(tmp_path: Path) -> None:
    _assert_atomic(tmp_path, _list_cases(tmp_path), False)


@pytest.mark.slow
def test_each_failing_operation_of_every_verb_leaves_the_earlier_or_the_new_output(tmp_path: Path) -> None:
    """Each one in pytest alone, else some, as above."""
    _assert_atomic(tmp_path, [*_list_cases(tmp_path), *_list_other_cases(tmp_path)], not is_quick())
