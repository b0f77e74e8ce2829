"""Which operators compute again, in backward, what forward had computed (activation checkpointing).

PyTorch gives an operator an autograd sequence number where gradients are recorded. Backward records none, unless a
checkpointed part of the model runs forward again inside it: under CheckpointFunctionBackward (use_reentrant=True), or
under the first backward function that needs a tensor that was not kept. A backward that itself is to be differentiated
(create_graph=True) has numbers throughout, which tells it from the second kind: there the gradient's own operators have
none.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from etloom import stacks

_NODE = "autograd::engine::evaluate_function:"
_CHECKPOINT = "CheckpointFunctionBackward"


def recomputed(events: pl.DataFrame, parent: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of the operators in these rows of events; parent: the row around each row, -1 for none."""
    nodes = stacks.asked(events["name"], lambda name: name.str.starts_with(_NODE))
    within = stacks.nearest(parent, nodes, rows)
    numbered = events["seq_id"].is_not_null().to_numpy()[rows]
    checkpoint = stacks.asked(events["name"], lambda name: name.str.contains(_CHECKPOINT, literal=True))
    mixed = np.zeros(events.height + 1, dtype=np.bool_)
    mixed[within[~numbered]] = True
    mixed[-1] = False  # where those outside any backward function were counted
    again: NDArray[np.bool_] = (
        (within >= 0) & numbered & (mixed[within] | np.append(checkpoint, False)[within])
    )
    return again
