"""The ranks of a run, and the groups of stages that share a timestep slot. Knows nothing of tasks or devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pipedec.core.errors import UserError


@dataclass(frozen=True)
class Topology:
    """The groups of stages (PipeDec §3.1): ``groups[i]`` lists the stage ranks of the paper's G_{i+1}, in order.

    Rank 0 is the draft rank (the paper's S); stages are ranks 1..n. Within a timestep the stages of a group run one after
    another, and the groups run in parallel. Raises UserError if a group is empty, or 1..n are not listed in order.
    """

    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for group in self.groups for rank in group]
        if not ranks or not all(self.groups):
            raise UserError("groups must hold at least one stage each")
        if ranks != list(range(1, len(ranks) + 1)):
            raise UserError(f"groups must list the stages 1..{len(ranks)} in order, each once, not {self.groups}")

    @classmethod
    def even(cls, stages: int, groups: int) -> Topology:
        """``stages`` stages in ``groups`` groups whose sizes differ by at most one, the larger first. Raises UserError."""
        if stages < 1:
            raise UserError(f"stages must be at least 1, not {stages}")
        if not 1 <= groups <= stages:
            raise UserError(f"groups must be between 1 and the number of stages ({stages}), not {groups}")
        small, larger = divmod(stages, groups)
        bounds = [index * small + min(index, larger) for index in range(groups + 1)]
        return cls(tuple(tuple(range(low + 1, high + 1)) for low, high in pairwise(bounds)))

    @property
    def num_stages(self) -> int:
        return sum(len(group) for group in self.groups)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def ranks(self) -> range:
        """Every rank, the draft rank 0 included."""
        return range(self.num_stages + 1)

    @cached_property
    def entry_ranks(self) -> tuple[int, ...]:
        return tuple(group[0] for group in self.groups)

    @cached_property
    def exit_ranks(self) -> tuple[int, ...]:
        return tuple(group[-1] for group in self.groups)

    @property
    def final_rank(self) -> int:
        """Rank n, which holds the head and verifies."""
        return self.groups[-1][-1]

    def following(self, rank: int) -> int:
        """The rank that receives from ``rank`` at a timestep: the next stage, or rank 0 after the last one."""
        return 0 if rank == self.final_rank else rank + 1

    def group_of(self, rank: int) -> int:
        """Index of the group that holds stage ``rank``, from 0. Raises ValueError if it is not a stage."""
        for index, group in enumerate(self.groups):
            if rank in group:
                return index
        raise ValueError(f"rank {rank} is not a stage of {self.groups}")

    def feeds_next_group(self, rank: int) -> bool:
        """Whether the output of ``rank`` enters the next group one timestep later: rank 0 and every exit but the last."""
        return rank == 0 or (rank != self.final_rank and rank in self.exit_ranks)

    def has_sync(self, active: Sequence[int]) -> bool:
        """Whether a timestep with these active entry ranks ends in a verdict ("SYNC in seq")."""
        return self.entry_ranks[-1] in active

    def active_ranks(self, active: Sequence[int]) -> tuple[int, ...]:
        """All ranks that compute in a timestep with these active entry ranks: rank 0 and the stages of the active groups."""
        return (0, *(rank for group in self.groups if group[0] in active for rank in group))


def rank_name(rank: int) -> str:
    """The name of a rank in messages: ``rank 0 (draft)``, ``rank 2 (stage 2)``."""
    return f"rank {rank} ({'draft' if rank == 0 else f'stage {rank}'})"


def of_rank(rank: int, message: str) -> str:
    """A message that names the rank it comes from, which it may do already."""
    return message if message.startswith(("rank ", "ranks ")) else f"rank {rank}: {message}"
