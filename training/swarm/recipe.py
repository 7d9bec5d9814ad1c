"""The recipe of a swarm: that of a training run, how its peers work together, and this machine.

What every peer must share stands in the run file (`training.swarm.run_file`) and counts in the
digest; what a peer may choose for itself stands in the sections `peer` and `coordinator`, and in
the settings that change the losses by their rounding only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from pipelines import recipe_file
from pipelines.recipe_file import Section, Texts
from training.recipe import Evaluation, TrainRecipe
from training.swarm.settings import Collaboration

Codec = Literal["none", "float16", "scaled-float16", "uniform8", "quantile8"]
_NOT_READ = {"pipeline", "max_skipped_steps", "log_every", "tensorboard"}
_STAGE: recipe_file.Stage = "swarm"


class Swarm(Section):
    """How the peers find and reach each other; the same for all of them."""

    codec: Codec = Field(
        "scaled-float16", description="form in which gradients travel: none (4 bytes a number), "
        "float16 (2 bytes; numbers below 6e-5 lose digits, those below 3e-8 all) and "
        "scaled-float16 (2 bytes), uniform8 and quantile8 (1 byte)"
    )  # fmt: skip
    matchmaking_s: float = Field(
        5.0, gt=0, le=120, description="a group gathers for so long; an epoch should take at "
        "least three times as long"
    )  # fmt: skip
    sender_s: float = Field(
        10.0, gt=0, description="a peer that sends nothing for so long in a round has failed it"
    )  # fmt: skip
    allreduce_s: float = Field(300.0, gt=0, description="the longest that a round averages")
    authorisation: bool = Field(
        True, description="only peers with a token of the authority take part"
    )
    token_minutes: int = Field(
        60, ge=5, le=1440, description="a token of the coordinator's service is valid for so long"
    )


class Peer(Section):
    """This machine alone; no part of the run file."""

    name: str = Field(
        "", max_length=48, description="shown to the others; none: the user and host name"
    )
    role: Literal["node", "client", "auxiliary"] = Field(
        "node", description="node: others can connect to it; client: behind a firewall; auxiliary: "
        "reduces for the others and learns nothing, so that it needs no data"
    )  # fmt: skip
    host: str = Field("0.0.0.0", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="to listen on; 0: any free one")
    announce: Texts = Field(
        (), description="addresses that others reach it by, where they are not those it listens "
        "on: /ip4/203.0.113.7/tcp/31337"
    )  # fmt: skip
    up_mbit: float = Field(100.0, gt=0, description="bandwidth up, Mbit/s; see swarm doctor")
    down_mbit: float = Field(100.0, gt=0, description="bandwidth down, Mbit/s")


class Coordinator(Section):
    """What `swarm start` offers; no part of the run file."""

    host: str = Field(
        "127.0.0.1", description="address of the service that gives run file, tokenizer and "
        "tokens; another than loopback needs HTTPS"
    )  # fmt: skip
    port: int = Field(8470, ge=0, le=65535, description="of the service; 0: any free one")
    url: str = Field("", description="how peers reach the service, where a proxy is in front of it")
    proxies: Texts = Field(
        ("127.0.0.1",), description="addresses or networks of the proxy, whose X-Forwarded-For is "
        "believed with --behind-proxy"
    )  # fmt: skip
    page_host: str = Field("127.0.0.1", description="address of the page, which is read-only")
    page_port: int = Field(8471, ge=0, le=65535, description="of the page; 0: any free one")
    gone_s: float = Field(30.0, gt=0, description="a peer that said nothing for so long is gone")
    poll_s: float = Field(2.0, gt=0, le=5, description="between two looks at the peers")


class SwarmRecipe(TrainRecipe):
    """Everything `gristmill swarm` needs to know. `schedule.steps` are epochs: global steps."""

    name: str = Field("swarm", pattern=r"^[\w-]{1,100}$", description="name of the run")
    collaboration: Collaboration = Collaboration()
    swarm: Swarm = Swarm()
    peer: Peer = Peer()
    coordinator: Coordinator = Coordinator()

    @model_validator(mode="before")
    @classmethod
    def _local_batch(cls, tree: Any) -> Any:
        """DiLoCo's batch of a local step is that of `batch`, here as everywhere."""
        match tree:
            case {"collaboration": {"mode": "diloco"} as fields, "batch": {"samples": int(batch)}}:
                diloco = {"local_batch": batch, **fields.get("diloco", {})}
                return {**tree, "collaboration": {**fields, "diloco": diloco}}
        return tree

    @model_validator(mode="after")
    def _one_batch(self) -> SwarmRecipe:
        fields = self.collaboration
        if "target_batch" in fields.model_fields_set:
            raise ValueError(
                f"collaboration.target_batch = '{fields.target_batch}': set batch.samples instead"
            )
        local = fields.diloco.local_batch
        if fields.mode == "diloco" and local != self.batch.samples:
            raise ValueError(
                f"collaboration.diloco.local_batch = '{local}' and batch.samples = "
                f"'{self.batch.samples}' both say how large a local step is: give batch.samples "
                "alone"
            )
        return self

    @model_validator(mode="after")
    def _rounds_fit(self) -> SwarmRecipe:
        """A search for a group must last longer than a group gathers."""
        needed, given = 2 * self.swarm.matchmaking_s + 2, self.collaboration.round_timeout_s
        if given < needed:
            raise ValueError(
                f"collaboration.round_timeout_s = '{given:g}' is too short for "
                f"swarm.matchmaking_s = '{self.swarm.matchmaking_s:g}': give {needed:g} or more"
            )
        return self

    @model_validator(mode="after")
    def _read_here(self) -> SwarmRecipe:
        """What a swarm does not read is refused."""
        if self.evaluation != Evaluation():
            raise ValueError(
                "evaluation.* means nothing in a swarm, which does not stop to evaluate: leave it "
                "out, and run `gristmill evaluate` on the coordinator's checkpoints"
            )
        unread = sorted(_NOT_READ & self.run.model_fields_set)
        if unread:
            raise ValueError(
                f"run.{unread[0]} means nothing in a swarm: leave it out; steps that are not taken "
                "are collaboration.max_skipped, and every epoch is told"
            )
        if self.run.strategy not in ("auto", "single"):
            raise ValueError(
                f"run.strategy = '{self.run.strategy}': a peer of a swarm is one process on one "
                "device, choose auto or single"
            )
        return self

    def settings(self) -> Collaboration:
        """`collaboration` with the batch of this recipe in it."""
        if self.collaboration.mode == "diloco":
            return self.collaboration
        return self.collaboration.model_copy(
            update={"target_batch": self.batch.examples(self.examples.sequence_length)}
        )

    def published(self) -> dict[str, Any]:
        """As a training run's, without this machine's sections."""
        recipe = super().published()
        for section in ("peer", "coordinator"):
            del recipe[section]
        del recipe["collaboration"]["target_batch"]  # `batch` says it
        return recipe

    def shared(self) -> dict[str, Any]:
        """The settings that go into the run file: without places on this machine, and without
        what each peer chooses. Crawls that have a URL stay: all peers read them there."""
        tree = self.model_dump(
            mode="json", exclude={"peer": True, "coordinator": True, "output": True}
        )
        local = any("://" not in place for place in self.data.manifests)
        tree["data"]["manifests"] = [] if local else list(self.data.manifests)
        tree["model"]["tokenizer"], tree["model"]["init"] = "", None
        for name in ("device", "compile", *_NOT_READ):
            del tree["run"][name]
        del tree["collaboration"]["target_batch"]
        return tree


def shipped_recipes() -> list[str]:
    """Names of the swarms' recipes that come with Gristmill."""
    return recipe_file.shipped(_STAGE)


def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> SwarmRecipe:
    """Read a swarm's recipe by path or shipped name, apply overrides, validate.

    Raises UserError with one line: the field, the value, what is valid.
    """
    return recipe_file.load(SwarmRecipe, _STAGE, name_or_path, overrides or [])
