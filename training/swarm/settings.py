"""How a swarm takes its steps: the settings that every peer of a run must share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipelines.recipe_file import Section


class DiLoCo(Section):
    """DiLoCo (Douillard et al. 2023, algorithm 1): many local steps, then one step of all peers.

    The defaults are the paper's. The inner optimiser is the run's own, and its moments stay with
    its peer, as in the paper and in OpenDiLoCo: they are in no state and no checkpoint. A joiner,
    and a run that goes on from a checkpoint, begins with moments of zero.
    """

    local_steps: int = Field(500, ge=1, description="H: steps of a peer between two rounds")
    local_batch: int | None = Field(
        None, ge=1, description="examples of a local step, the same at every peer; needed"
    )
    outer_learning_rate: float = Field(0.7, gt=0, description="of the Nesterov step of all peers")
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of that step")
    patience_s: float = Field(
        60.0, ge=0, description="so long peers that have done their steps wait for slower ones, "
        "which then come with the steps they have; at least half of the peers must be done"
    )  # fmt: skip


class Collaboration(Section):
    """One global step of all peers together, an epoch."""

    mode: Literal["sync", "delayed", "diloco"] = Field(
        "sync", description="sync: as one process with the whole batch; delayed: the peers "
        "average while they compute the next batch; diloco: many local steps, few rounds"
    )  # fmt: skip
    target_batch: int = Field(
        4096, ge=1, description="examples of one step, all peers together; not for diloco"
    )
    labels_per_sample: tuple[float, ...] = Field(
        (), description="ALBERT: labels of an example, by term (masked tokens, sentence order), "
        "on average; with them one gradient is kept and sent, without them one for each term"
    )  # fmt: skip
    min_peers: int = Field(1, ge=1, description="peers with gradients that the first step awaits")
    start_wait_s: float = Field(600.0, gt=0, description="so long the start waits for min_peers")
    announce_s: float = Field(1.0, ge=0, description="between two reports of a peer's progress")
    look_s: float = Field(0.5, ge=0, description="between two looks at the others' reports")
    round_timeout_s: float = Field(60.0, gt=0, description="to find a group and to average in it")
    download_timeout_s: float = Field(300.0, gt=0, description="for one download of the state")
    attempts: int = Field(
        3, ge=1, description="rounds in a row with the same gradients; the last one also takes a "
        "group that is not more than half of the peers"
    )  # fmt: skip
    norm_ratio: float = Field(
        100.0, gt=1, description="a gradient so many times longer than the median of the last "
        "steps is not sent, and if it is the average, not taken"
    )  # fmt: skip
    max_skipped: int = Field(20, ge=1, description="steps not taken, in a row, that end the run")
    diloco: DiLoCo = Field(DiLoCo(), description="for mode = 'diloco'")

    @model_validator(mode="after")
    def _possible(self) -> Collaboration:
        if self.mode == "diloco":
            if self.diloco.local_batch is None:
                raise ValueError(
                    "mode = 'diloco' needs diloco.local_batch, the examples of a local step: "
                    "give a number, as 64"
                )
            if "target_batch" in self.model_fields_set:
                raise ValueError(
                    f"target_batch = '{self.target_batch}' means nothing in mode = 'diloco': "
                    "leave it out and set diloco.local_batch and diloco.local_steps"
                )
        elif self.diloco != DiLoCo():
            raise ValueError(
                f"diloco.* means nothing in mode = '{self.mode}': leave it out or set "
                "mode = 'diloco'"
            )
        if any(number <= 0 for number in self.labels_per_sample):
            raise ValueError(
                f"labels_per_sample = '{list(self.labels_per_sample)}' must be above 0 in each "
                "term: give the means of a sample of the data"
            )
        return self
