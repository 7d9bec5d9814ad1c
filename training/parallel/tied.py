"""Parameters that several stages use: a decoder's tied embedding and head, ALBERT's one block.

torch gives each rank that uses one a copy of its own and says nothing: the copies then get each a
part of the gradient and drift apart. Here the stages of one rank share the parameter itself, which
collects the gradients of all of them (in a V placement the first and the last stage are on one
rank). Where it is on several ranks the copies start equal, and one all-reduce after the schedule
gives each the whole gradient: equal copies with equal gradients move alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from training.parallel.chain import Chain
from training.parallel.replicas import add_up, gradient
from training.parallel.schedules import Schedule, rank_of
from training.parallel.units import Cut


def stages_of(chain: Chain, cut: Cut) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter, by its first name in the root, in the root's order."""
    place = {unit: stage for stage in range(cut.stages) for unit in cut.of(stage)}
    return {
        name: tuple(sorted({place[unit] for unit in units}))
        for name, units in chain.holders().items()
    }


def ranks_of(
    stages: Mapping[str, Sequence[int]], schedule: Schedule, ranks: int
) -> dict[str, tuple[int, ...]]:
    """The ranks of a pipeline that hold each parameter; that of its first stage is the first."""
    return {
        name: tuple(dict.fromkeys(rank_of(schedule, stage, ranks) for stage in of))
        for name, of in stages.items()
    }


def several_uses(
    stages: Mapping[str, Sequence[int]], schedule: Schedule, ranks: int
) -> frozenset[str]:
    """Parameters that more than one stage of some rank uses."""
    return frozenset(
        name
        for name, of in stages.items()
        if len(of) > len({rank_of(schedule, stage, ranks) for stage in of})
    )


class Tied:
    """The copies of parameters that this rank holds and others too.

    pipelines: the ranks (of the world) of each pipeline in order; every rank of all of them must
    call this at the same time, for the groups of ranks that share something are started here.
    holders: as `ranks_of` gives them.
    """

    def __init__(
        self, pipelines: Sequence[Sequence[int]], holders: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._sets: list[tuple[dist.ProcessGroup, dict[str, int]]] = []
        """Groups that this rank is in, with the names that each shares: their first holders."""
        here = dist.get_rank()
        shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        for ranks in sorted({tuple(sorted(ranks)) for ranks in shared.values()}):
            names = [name for name, of in shared.items() if tuple(sorted(of)) == ranks]
            for pipeline in pipelines:
                members = [pipeline[rank] for rank in ranks]
                group = dist.new_group(members)
                if here in members:
                    first = {name: pipeline[shared[name][0]] for name in names}
                    self._sets.append((group, first))

    def start_equal(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give all copies the values of the first holder's."""
        for group, names in self._sets:
            for name, first in names.items():
                dist.broadcast(parameters[name].detach(), src=first, group=group)

    def add_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give all copies the sum of their gradients."""
        for group, names in self._sets:
            trained = [parameters[name] for name in names if parameters[name].requires_grad]
            add_up([gradient(parameter) for parameter in trained], group)
