"""The rule for all predictions: how far a model misses the recording decides whether it predicts anything else.

A model whose error is above `MAX_ERROR` gives no prediction, in any verb. An error above `DOUBTFUL_ERROR` is reported
as doubtful; the intervals of `etloom predict` contain it.
"""

from __future__ import annotations

from etloom.core.errors import AnalysisError
from etloom.graphs import quality
from etloom.simulator.recorded_run import RecordedRun

DOUBTFUL_ERROR = 0.05
"""Relative error above which a prediction is doubtful."""

MAX_ERROR = 0.5
"""Relative error above which a prediction is refused."""

_REMEDY = "record all ranks and more steps"


def describe_models(recording: RecordedRun, *, needs_network: bool = True) -> list[str]:
    """Return sentences on how well the graph and, if needed, the fitted network reproduce a recording."""
    error = recording.reproduction_error if needs_network else None
    lines = [] if error is None else [describe_error(_describe_network_error(error), error)]
    misfit = _find_misfit(recording)
    return lines if misfit is None else [*lines, f"doubtful: {misfit.reason}"]


def require_models(recording: RecordedRun, *, needs_network: bool = True) -> None:
    """Raise AnalysisError if the graph or, if needed, the fitted network is too far from a recording to predict."""
    if (misfit := _find_misfit(recording)) is not None:
        remedy = "etloom analyze graph-quality shows what it does not explain"
        require_error(misfit.reason, misfit.error, remedy)
    error = recording.reproduction_error if needs_network else None
    if error is not None:
        remedy = (
            f"{_REMEDY}; etloom predict RUN without options shows the fit, "
            'etloom simulate RUN --set "comm x0.5" needs none'
        )
        require_error(_describe_network_error(error), error, remedy)


def describe_error(sentence: str, error: float) -> str:
    """Return a sentence on a relative error, marked if the error makes predictions doubtful."""
    return sentence if abs(error) <= DOUBTFUL_ERROR else f"doubtful: {sentence}"


def require_error(sentence: str, error: float, remedy: str = _REMEDY) -> None:
    """Raise AnalysisError with a sentence on a relative error if the error is too large for predictions."""
    if abs(error) > MAX_ERROR:
        raise AnalysisError(f"no prediction: {sentence}", remedy=remedy)


def _describe_network_error(error: float) -> str:
    return f"the models reproduce the recorded step time with an error of {100 * error:+.1f} %"


def _find_misfit(recording: RecordedRun) -> quality.Misfit | None:
    """Return the largest `Misfit` of a rank, with a sentence as its reason; None if the graph explains all ranks."""
    misfits = quality.find_unexplained_ranks(recording.graph.graph, recording.job)
    if not misfits:
        return None
    rank, worst = max(misfits.items(), key=lambda item: item[1].error)
    more = f"; {len(misfits) - 1} more" if len(misfits) > 1 else ""
    sentence = f"the graph does not explain the recording (rank {rank}, {worst.reason}{more})"
    return quality.Misfit(sentence, worst.error)
