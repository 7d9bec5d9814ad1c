"""What peers of all roles have in common: from the run file to the last epoch.

What each part does is told there: the network of peers (`transport`), who may be in it
(`membership`), the steps (`optimiser`); what a role does in its turn: `trainer` (nodes and clients)
and `auxiliary`. The folder of a peer:

    DIR/run.json        the run file it joined by
    DIR/identity.key    its key: with it the peer keeps its name, data and credit
    DIR/token, trust.json   what lets it in, and whom it lets in
    DIR/position.json, examples.jsonl   what it has read
    DIR/addresses.json  peers it has met
    DIR/metrics.jsonl   a line for each epoch
    DIR/state/          weights that it serves or downloads
"""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from training import run_folder
from training.networks import build_network
from training.objectives import Objective
from training.optimisers import build_optimiser
from training.schedules import learning_rate_factor
from training.stopping import StopRequest
from training.strategy import Placement, placed
from training.swarm import bootstrap, leaving, ports, reaching
from training.swarm.epochs import Stage
from training.swarm.heartbeat import Heartbeat
from training.swarm.leaving import Leave, interrupted
from training.swarm.membership import Membership, Say, membership
from training.swarm.optimiser import CollaborativeOptimiser
from training.swarm.recipe import SwarmRecipe
from training.swarm.rounds_told import Teller
from training.swarm.run_file import RunFile
from training.swarm.supervisor import EXIT_AGAIN
from training.swarm.token_client import Account
from training.swarm.transport import Gone, SwarmTransport, TransportSettings, start_dht
from training.swarm.types import Announcement, PeerInfo

METRICS_FILE = "metrics.jsonl"
STATE_FOLDER = "state"
_ENTRANCE_S = 120.0
_MEET_S = 60.0
_LOST_S = 120.0


class Lost(Exception):
    """The others are there, and this peer does not get on with them: join anew."""


@dataclass
class Progress:
    """What a peer did since it joined."""

    epochs: int = 0
    samples: int = 0
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Start:
    """What a peer of any role begins with."""

    recipe: SwarmRecipe
    run: RunFile
    member: Membership
    place: Placement
    stop: StopRequest
    say: Say


def take_part(
    recipe: SwarmRecipe,
    run: RunFile,
    account: Account | None,
    peer: Callable[[Start], Peer],
    say: Say,
) -> dict[str, Any]:
    """Let this member in, make the `peer` of its role, work until the end; gives the summary.

    `status` is 'finished', 'left' (SIGTERM, Ctrl+C) or 'lost' (to be started anew, see
    `training.swarm.supervisor`). Use in the main thread. Raises UserError, Fault.
    """
    folder = recipe.output.directory
    with StopRequest() as stop, placed(recipe.run) as place, run_folder.held(folder):
        member = membership(
            Path(folder), run.run, run.authority,
            authorised=recipe.swarm.authorisation, account=account,
        )  # fmt: skip
        member.enter()
        try:
            with interrupted(stop), peer(Start(recipe, run, member, place, stop, say)) as working:
                return working.work()
        except Leave:  # before it had joined
            return {
                "status": "left", "run": run.run, "peer": member.identity.peer_id,
                "role": recipe.peer.role, "epoch": 0, "epochs": recipe.schedule.steps,
                "own_epochs": 0, "own_samples": 0,
            }  # fmt: skip


class Peer:
    """What peers of all roles have in common: the way in, whom they hear, the way out."""

    def __init__(self, start: Start, vocabulary: int) -> None:
        recipe, member = start.recipe, start.member
        self.recipe, self.run, self.place = recipe, start.run, start.place
        self.stop, self.say = start.stop, start.say
        self.member, self.peer_id = member, member.identity.peer_id
        self.folder = Path(recipe.output.directory)
        self.known = bootstrap.Known(self.folder / bootstrap.FILE)
        self.progress = Progress()
        self.coordinator = coordinator_id(start.run)
        self._met_at, self._heard_at = -float("inf"), time.monotonic()
        self._asked_again = False
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            network = build_network(recipe, vocabulary)
            self.network, self.objective = network, Objective(network).to(self.place.device)
            self._open(stack)
            self._connect(stack)
            self._closing = stack.pop_all()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Open what this role needs before any other process is started."""

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    # The way in

    def _connect(self, stack: contextlib.ExitStack) -> None:
        """Start the peer's processes, and stop them at the end."""
        recipe, peer = self.recipe, self.recipe.peer
        if peer.role != "client":
            ports.check(peer.host, peer.port)
        ways_in = bootstrap.entrance(
            bootstrap.candidates(
                self.run.addresses, self.known.addresses(), own_id=self.peer_id
            ),
            wait_s=_ENTRANCE_S, stopped=lambda: self.stop.requested, say=self.say,
        )  # fmt: skip
        self.dht = start_dht(
            ways_in,
            role=peer.role,
            host_addresses=[listening(peer.host, peer.port)],
            announce_addresses=list(peer.announce),
            identity_path=self.member.identity.path,
            **self.member.dht_options(),
        )
        settings = transport_settings(recipe, self.folder)
        try:
            transport = SwarmTransport(
                self.dht,
                settings,
                averaged(self.network, recipe, len(self.objective.terms)),
                self.member.guard(self.dht),
            )
        except BaseException:
            self.dht.shutdown()
            raise
        self.transport = Heartbeat(
            transport, every_s=settings.announcement_s / 4,
            longest_s=recipe.collaboration.round_timeout_s + settings.allreduce_timeout_s + 60.0,
        )  # fmt: skip
        stack.callback(self.transport.leave)
        self.transport.start()
        keeper = self.member.keep(
            self.dht, self.say, call=lambda: self._call(self.run.addresses)
        )  # fmt: skip
        if keeper is not None:
            # It may be amid a request, for which nobody who leaves waits.
            stack.callback(lambda: threading.Thread(target=keeper.stop, daemon=True).start())
        self.teller = Teller(self.dht, self.run.run, self.member.identity)
        self.optimiser = CollaborativeOptimiser(
            self.network,
            build_optimiser(recipe.optimiser, self.network),
            transport=self.transport,
            peer=PeerInfo(self.peer_id, name_of(recipe), peer.role, device_name(self.place.device)),
            settings=recipe.settings(),
            terms=len(self.objective.terms),
            rate=lambda step: (
                recipe.optimiser.learning_rate * learning_rate_factor(recipe.schedule, step)
            ),
            max_gradient_norm=recipe.optimiser.max_gradient_norm,
            tell=self._tell,
        )

    def _tell(self, stage: Stage, epoch: int, text: str) -> None:
        if stage in (Stage.REDUCE, Stage.CHECK, Stage.CATCH_UP):
            self.say(f"epoch {epoch:,}: {stage}: {text}")

    # Work

    def work(self) -> dict[str, Any]:
        """Turn after turn, until the last epoch or a signal."""
        steps = self.recipe.schedule.steps
        try:
            self._begin()
            self.say(f"joined '{self.run.run}' at epoch {self.optimiser.epoch:,} of {steps:,}")
            while not self._done() and not self.stop.requested:
                self._turn()
                self._look_around()
            if self._done():
                self._end()
                return self._summary("finished")
        except Leave:
            pass
        except (Lost, Gone) as error:
            self.say(f"{error}")
            return self._summary("lost") | {"exit_code": EXIT_AGAIN}
        finally:
            leaving.disarm()
            self.say(f"{self.stop.name or 'the end'}: leaving")
        return self._summary("left")

    def _begin(self) -> None:
        """Become one of the others."""
        self.optimiser.start()

    def _done(self) -> bool:
        """Whether the last epoch is done."""
        return self.optimiser.epoch >= self.recipe.schedule.steps

    def _turn(self) -> None:
        """Do what is due now."""
        raise NotImplementedError

    def _end(self) -> None:
        """Stay for what the others still need after the last epoch."""

    def _note(self, line: dict[str, Any]) -> None:
        with (self.folder / METRICS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _others(self) -> list[Announcement]:
        return [
            one for one in self.transport.announcements() if one.peer.peer_id != self.peer_id
        ]  # fmt: skip

    def _look_around(self) -> None:
        """Once a minute: remember whom one has met, call who is not heard. Raises Lost."""
        if not self.dht.is_alive():
            raise Lost("the DHT's process has ended")
        now = time.monotonic()
        if now - self._met_at < _MEET_S:
            return
        self._met_at = now
        heard = {one.peer.peer_id for one in self._others()}
        if heard:
            self._heard_at, self._asked_again = now, False
            with contextlib.suppress(OSError):
                self.known.add(reaching.connected(self.dht))
            if self.coordinator and self.coordinator not in heard:
                self._call(self.run.addresses)  # it may have been started again, and know nobody
        elif now - self._heard_at > _LOST_S:
            good = self._answering(
                bootstrap.candidates(
                    self.run.addresses, self.known.addresses(), own_id=self.peer_id
                )
            )
            if good and not self._asked_again:
                self._asked_again = True
                self._call(good)
            elif good:
                raise Lost(f"nobody is heard any more, but '{good[0]}' answers")

    def _answering(self, addresses: Sequence[str]) -> list[str]:
        return [one.address for one in bootstrap.try_all(addresses) if not one.why]

    def _call(self, addresses: Sequence[str]) -> None:
        """Call peers again that have forgotten this one, and show them its token."""
        if reaching.call(self.dht, self._answering(addresses)):
            self.member.show(self.dht, self.say)

    def _summary(self, status: str) -> dict[str, Any]:
        progress = self.progress
        return {
            "status": status,
            "run": self.run.run,
            "peer": self.peer_id,
            "role": self.recipe.peer.role,
            "epoch": self.optimiser.epoch,
            "epochs": self.recipe.schedule.steps,
            "state_hash": self.optimiser.state_hash,
            "own_epochs": progress.epochs,
            "own_samples": progress.samples,
            "seconds": round(time.monotonic() - progress.began, 1),
            "directory": str(self.folder),
        }


def averaged(network: torch.nn.Module, recipe: SwarmRecipe, terms: int) -> list[torch.Tensor]:
    """What peers average, by shape: the gradients, of each term of the loss where they are not put
    together before (see `training.swarm.gradients`)."""
    together = recipe.collaboration.mode == "diloco" or recipe.collaboration.labels_per_sample
    shapes = [one.shape for one in network.parameters() if one.requires_grad]
    return [torch.zeros(shape) for _ in range(1 if together else terms) for shape in shapes]


def transport_settings(recipe: SwarmRecipe, folder: Path) -> TransportSettings:
    """How this peer averages."""
    peer, settings = recipe.peer, recipe.collaboration
    return TransportSettings(
        run=recipe.name,
        codec=recipe.swarm.codec,
        matchmaking_s=recipe.swarm.matchmaking_s,
        allreduce_timeout_s=recipe.swarm.allreduce_s,
        sender_timeout_s=recipe.swarm.sender_s,
        weight_cap=2.0 * samples_of_epoch(recipe),
        announcement_s=max(20.0, 4 * settings.announce_s),
        folder=folder / STATE_FOLDER,
        role=peer.role,
        up_mbit=peer.up_mbit,
        down_mbit=peer.down_mbit,
    )


def samples_of_epoch(recipe: SwarmRecipe) -> int:
    """Samples of an epoch; under DiLoCo those of one peer's local steps."""
    settings = recipe.settings()
    if settings.mode == "diloco":
        return int(settings.diloco.local_batch or 0) * settings.diloco.local_steps
    return settings.target_batch


def coordinator_id(run: RunFile) -> str:
    """The coordinator's peer id: that of the run file's first address."""
    return bootstrap.check_address(run.addresses[0]).peer_id if run.addresses else ""


def listening(host: str, port: int) -> str:
    """The address to listen on, as hivemind wants it. Raises UserError."""
    kind = "ip6" if ":" in host else "ip4"
    text = f"/{kind}/{host}/tcp/{port}"
    bootstrap.check_address(text.rsplit("/", 1)[0] + f"/{port or 1}", peer=False)
    return text


def name_of(recipe: SwarmRecipe) -> str:
    """What this peer is called."""
    if recipe.peer.name:
        return recipe.peer.name
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "peer"
    return f"{user}@{socket.gethostname()}"[:48]


def device_name(device: torch.device) -> str:
    """What this peer computes on."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads != 1)}"
