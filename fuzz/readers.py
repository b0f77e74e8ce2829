"""Coverage-guided fuzzing of the readers that are written in Python, with atheris (`make fuzz-readers`).

    python fuzz/readers.py FORMAT CORPUS [options of libFuzzer, such as -max_total_time=60]

FORMAT is a format of tests/fuzzing/seeds.py with one file, such as memory-snapshot (pickle), xplane (protobuf), nsys
(SQLite), or ``facts``: the meta.json of a saved run. The corpus begins with the seed; inputs that reach new code are
added to it. An exception that is not an `EtloomError` ends the run, and the input stays in crash-*.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["etloom.formats", "etloom.core"]):
    import etloom
    from etloom import formats
    from etloom.core.errors import EtloomError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzzing.seeds import SEEDS
from support import small_traces

FACTS = "facts"


def make_target(name: str, folder: Path, corpus: Path) -> Callable[[bytes], None]:
    """Write the seed of a format to the corpus; return a function that reads an input as that format."""
    if name == FACTS:
        run = folder / "run.parquet"
        etloom.export(etloom.open(small_traces.write_run(folder / "run"), use_cache=False), run)
        file = next(iter(sorted(run.rglob("meta.json"))))
    else:
        SEEDS[name].write(folder)
        file = run = folder / SEEDS[name].files[0]
    (corpus / "seed").write_bytes(file.read_bytes())

    def read(content: bytes) -> None:
        file.write_bytes(content)
        with contextlib.suppress(EtloomError):
            if name == FACTS:
                etloom.open(run, use_cache=False)
            else:
                formats.read(run)

    return read


def main() -> None:
    name, corpus, *options = sys.argv[1:]
    Path(corpus).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="etloom-fuzz-") as folder:
        target = make_target(name, Path(folder), Path(corpus))
        atheris.Setup([sys.argv[0], corpus, "-timeout=10", "-rss_limit_mb=2048", *options], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
