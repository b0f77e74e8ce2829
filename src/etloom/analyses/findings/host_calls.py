"""Finds the calls of the host that compile, capture device graphs, or tokenize text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from etloom.core import arrays, categories

if TYPE_CHECKING:
    from etloom.analyses.findings.rank_view import RankView

_TOKENIZES = (
    r"(?i)(?:tokenization_\w+|tokenizers?|sentencepiece|tiktoken)(?:/\w+)*\.py\(\d+\): "
    r"(?:__call__|_?(?:batch_)?encode\w*)$"
    r"|\): \w*(?:^|_|\b)tokeni[sz]e\w*$|encode\w* of (?:builtins\.)?(?:tokenizers\.|Tokenizer|sentencepiece|CoreBPE)"
)
"""Matches Python frames of tokenizers."""
_PARSES_PYTHON = r"(?:^|/)tokenize\.py\("
"""Matches frames of Python's own module, with which compilers read source code."""
_TOKENIZES_RANGE = r"(?i)(?:^|[^a-z])tokeni[sz]"
"""Matches annotations of tokenizers."""
_COMPILES = (
    r"dynamo_timed|^compile_fx|_compile\.compile_inner|^convert_frame|^aot_autograd"
    r"|inductor_compile|^CachingAutotuner\.(?:benchmark|precompile)|deferred_cudagraphify"
)
CAPTURES = r"StreamBeginCapture|\bcapture_begin\b|cudagraph|CUDAGraphNode"
"""Matches events of `find_compiles` that capture a device graph."""
_CAPTURE_BEGIN, _CAPTURE_END = r"StreamBeginCapture|\bcapture_begin\b", r"StreamEndCapture|\bcapture_end\b"
"""Matches calls of the runtime, and frames without which these are not recorded."""


def find_tokenizer_calls(view: RankView) -> pl.DataFrame:
    """Return the outermost frames and annotations of tokenizers outside of data loaders.

    Columns as in `RankView.find_host_events`. Calls that launch work on a device do more, and are left out.
    """
    frames = view.find_host_events(_TOKENIZES, categories.PYTHON_CATEGORIES)
    frames = frames.filter(~pl.col("name").str.contains(_PARSES_PYTHON))
    ranges = view.find_host_events(_TOKENIZES_RANGE, categories.ANNOTATION_CATEGORIES)
    calls = select_outermost(pl.concat([frames, ranges]).sort("ts"))
    launched = np.sort(arrays.to_array(view.activities["launch_ts"], -1))
    starts, ends = calls["ts"].to_numpy(), calls["end"].to_numpy()
    is_pure = np.searchsorted(launched, starts) == np.searchsorted(launched, ends)
    loading = view.data_loading.covered(starts, ends)
    return calls.filter(pl.Series(is_pure & (2 * loading < ends - starts), dtype=pl.Boolean))


def find_compiles(view: RankView) -> pl.DataFrame:
    """Return the events in which torch.compile compiles or a device graph is captured, of nested ones the outermost.

    Columns as in `RankView.find_host_events`. A capture lasts until it is ended.
    """
    begins, ends = view.find_host_events(_CAPTURE_BEGIN), view.find_host_events(_CAPTURE_END)
    if begins.height and ends.height:
        ends = ends.select("pid", until="end", at="ts").sort("at")
        begins = begins.join_asof(
            ends, left_on="ts", right_on="at", by="pid", strategy="forward", check_sortedness=False
        )
        until = pl.coalesce("until", "end")
        begins = begins.with_columns(end=until, dur=until - pl.col("ts")).drop("until", "at")
    return select_outermost(pl.concat([view.find_host_events(_COMPILES), begins]))


def select_outermost(events: pl.DataFrame) -> pl.DataFrame:
    """Return the host events that do not lie in another event of the table ``events`` (pid, tid, ts, end), by start."""
    if events.height < 2:
        return events
    ordered = events.sort("ts", "end", descending=(False, True), maintain_order=True)
    before = pl.col("end").cum_max().shift(1).over("pid", "tid")
    return ordered.filter((before < pl.col("end")).fill_null(True))
