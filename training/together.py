"""Work that all ranks leave together: with its result, or with the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from models.errors import Fault, UserError

_Result = TypeVar("_Result")


def distributed() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this rank; 0 without a process group."""
    return dist.get_rank() if distributed() else 0


def on_all(work: Callable[[], _Result], what: str) -> list[_Result]:
    """What `work` gives on each rank, in their order.

    When it raises on one rank, all raise: UserError as it was, anything else as a Fault that
    begins with `what`. Collectives inside `work` must fail on all ranks or none.
    """
    outcome: tuple[Any, str, bool]
    try:
        outcome = (work(), "", False)
    except UserError as error:
        outcome = (None, str(error), True)
    except (Exception, CheckpointException) as error:  # which is not an Exception
        outcome = (None, f"{what}: {_one_line(error)}", False)
    outcomes = [outcome]
    if distributed():
        outcomes = [outcome] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
    for _, wrong, by_user in outcomes:
        if wrong:
            raise UserError(wrong) if by_user else Fault(wrong)
    return [cast("_Result", result) for result, _, _ in outcomes]


def on_first(work: Callable[[], _Result], what: str) -> _Result:
    """What `work` gives on rank 0, the only one that does it, on every rank."""
    return cast("_Result", on_all(lambda: work() if rank() == 0 else None, what)[0])


def _one_line(error: BaseException) -> str:
    inner = error
    if isinstance(error, CheckpointException):
        inner = next(iter(error.failures.values()))[0]
    if isinstance(inner, OSError):
        place = f": '{inner.filename}'" if inner.filename else ""
        return f"{inner.strerror or inner}{place}"
    kind = "" if isinstance(inner, Fault) else f"{inner.__class__.__name__}: "
    return f"{kind}{inner}".replace("\n", " ")
