"""Objects that one rank sends to another, such as the shapes of activations between the stages of a pipeline.

Ranks run one after another: what an earlier one has sent is in a file of a folder that the launcher has created for
this recording, with a random name, so that no other object is ever unpickled. A later one, or one that is not recorded,
cannot be asked: then an object like the last one that this rank has sent itself is received.
"""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

_NOTHING = object()


class ObjectExchange:
    """Replaces send_object_list and recv_object_list."""

    def __init__(self, torch: Any, folder: Path, rank: int) -> None:
        self._torch, self._folder, self._rank = torch, folder, rank
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._last: Any = _NOTHING

    def send(
        self,
        objects: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        **_: Any,
    ) -> None:
        """Keep objects for a rank that runs later."""
        target = self._global_rank(dst, group, group_dst)
        for each in objects:
            self._path(self._rank, target).write_bytes(pickle.dumps(each))
            self._last = each

    def receive(
        self,
        objects: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> int:
        """Fill in what a rank that has run before has sent, else what this rank has sent last."""
        source = self._global_rank(src, group, group_src)
        for index in range(len(objects)):
            path = self._path(source, self._rank)
            if path.exists():
                objects[index] = pickle.loads(path.read_bytes())  # noqa: S301
            elif self._last is not _NOTHING:
                objects[index] = self._last
            else:
                raise RuntimeError(
                    f"rank {self._rank} needs an object of rank {source}, such as the shapes of a pipeline's "
                    f"activations: record the ranks before it too (--ranks 0-{self._rank}), or give each "
                    "PipelineStage input_args and output_args"
                )
        return source

    def derive_gradients_of_pipelines(self) -> None:
        """Let a stage of a pipeline take the shapes of gradients from its outputs: the next stage has not run.

        Whether all stages know their shapes is a vote by messages; here it is that of this rank.
        """
        try:
            from torch.distributed.pipelining import stage
            from torch.distributed.pipelining._utils import _derive_grad_metas, _StageBackwardMeta
        except ImportError:  # before torch 2.12 there is nothing to derive
            return
        kind: Any = stage.PipelineStage
        receive, vote, hear = kind._recv_meta, kind._warmup_forward_vote, kind._warmup_backward_result

        def receive_or_derive(self: Any, source_stage: int) -> Any:
            if source_stage > self.stage_index:
                return _StageBackwardMeta(backward_metas=_derive_grad_metas(self._stage_meta.outputs))
            return receive(self, source_stage)

        def decide_vote(self: Any, *arguments: Any, **options: Any) -> Any:
            self._etloom_vote = vote(self, *arguments, **options)
            return self._etloom_vote

        def combine_votes(self: Any, *arguments: Any, **options: Any) -> Any:
            return hear(self, *arguments, **options) * self._etloom_vote

        kind._recv_meta = receive_or_derive
        kind._warmup_forward_vote = decide_vote
        kind._warmup_backward_result = combine_votes

    def _path(self, source: int, target: int) -> Path:
        number = self._numbers[source, target]
        self._numbers[source, target] += 1
        return self._folder / f"{source}_{target}_{number}.pickle"

    def _global_rank(self, rank: int | None, group: Any, group_rank: int | None) -> int:
        if rank is not None or group_rank is None:
            return rank or 0
        distributed = self._torch.distributed
        return int(distributed.get_global_rank(group or distributed.group.WORLD, group_rank))
