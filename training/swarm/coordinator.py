"""The coordinator of a swarm: the way in, the page, the checkpoints. It trains nothing.

It watches announcements and receipts (`collector`, `ledger`), serves the page, gives tokens to
allowed users, and every `checkpoint.every` epochs downloads the weights that most peers announce
and writes them. When it is started again it has its run, its authority and its newest checkpoint;
peers that find nobody with newer weights begin with that. The folder of a run:

    DIR/run.json        the signed run file
    DIR/authority/      keys and allowlist (`training.swarm.authority`)
    DIR/identity.key    its peer id, by which peers know the coordinator
    DIR/metrics.sqlite, ledger.sqlite   what the page shows
    DIR/audit.jsonl     who was given a token
    DIR/checkpoints/    `training.swarm.checkpointer`; DIR/model/ the newest in transformers' form
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import UserError
from models.tokenizer import tokenizer_file
from training import run_folder
from training.networks import build_network
from training.objectives import Objective
from training.prepare import Prepared, prepare
from training.stopping import StopRequest
from training.strategy import placed
from training.swarm import join_routes, revocation, rounds_told, run_file, token_service
from training.swarm.authority import Authority
from training.swarm.checkpointer import Checkpointer, Plan
from training.swarm.collector import Collector, Watch
from training.swarm.dashboard import Dashboard
from training.swarm.keys import Untrusted
from training.swarm.leaving import Leave, interrupted
from training.swarm.ledger import FILE as LEDGER_FILE
from training.swarm.ledger import Ledger
from training.swarm.membership import Membership, Say, membership
from training.swarm.metrics_store import FILE as METRICS_FILE
from training.swarm.metrics_store import MetricsStore, RunFacts
from training.swarm.peer import averaged, listening, name_of, transport_settings
from training.swarm.recipe import SwarmRecipe
from training.swarm.run_file import RunFile
from training.swarm.state import NoState
from training.swarm.token_service import ServiceSettings
from training.swarm.tokens import dht_key as tokens_key
from training.swarm.transport import SwarmTransport, start_dht
from training.swarm.types import Announcement, PeerInfo, State

AUTHORITY_FOLDER = "authority"
AUDIT_FILE = "audit.jsonl"
OWN_USER = "coordinator"
_OWN_TOKEN_S = 24 * 3600
_RENEW_S = 12 * 3600
_PUBLISH_S = 60.0
_DOWNLOAD_S = 60.0
_GOODBYE_S = 20.0


@dataclass(frozen=True)
class Doors:
    """Where the coordinator listens, as it is told. certificate, private_key: PEM files for
    HTTPS. behind_proxy: something in front speaks HTTPS."""

    certificate: Path | None = None
    private_key: Path | None = None
    behind_proxy: bool = False


def authority_of(folder: Path, run: str) -> Authority:
    """The authority in the folder of a run; made where there is none. Raises UserError."""
    place = folder / AUTHORITY_FOLDER
    if not place.exists():
        return Authority.create(place, run)
    authority = Authority.load(place)
    if authority.run != run:
        raise UserError(
            f"'{folder}' holds the run '{authority.run}', and the recipe's name is '{run}': give "
            "another folder with --output, or --set name=" + authority.run
        )
    return authority


def coordinate(recipe: SwarmRecipe, doors: Doors, *, say: Say = lambda _: None) -> dict[str, Any]:
    """Coordinate the recipe's run until its last epoch or a signal; gives a summary.

    Use in the main thread. Raises UserError, Fault.
    """
    folder = Path(recipe.output.directory)
    with StopRequest() as stop, placed(recipe.run), run_folder.held(str(folder)):
        prepared = prepare(recipe)
        authority = authority_of(folder, recipe.name)
        with contextlib.ExitStack() as stack, interrupted(stop):
            return _Coordinator(
                recipe=recipe, prepared=prepared, authority=authority, doors=doors, stop=stop,
                say=say, stack=stack,
            ).work()  # fmt: skip


class _Coordinator:
    def __init__(
        self,
        *,
        recipe: SwarmRecipe,
        prepared: Prepared,
        authority: Authority,
        doors: Doors,
        stop: StopRequest,
        say: Say,
        stack: contextlib.ExitStack,
    ) -> None:
        self.recipe, self.authority, self.stop, self.say = recipe, authority, stop, say
        self.folder = Path(recipe.output.directory)
        self.member = self._member()
        network = build_network(recipe, prepared.vocab_size)
        self.checkpointer = Checkpointer(
            Plan(
                self.folder, every=recipe.checkpoint.every, keep=recipe.checkpoint.keep,
                active_s=recipe.coordinator.gone_s, export_to=self.folder / run_folder.MODEL_FOLDER,
            ),
            network=network, tokenizer=recipe.model.tokenizer, identity=prepared.identity,
        )  # fmt: skip
        self.kept: tuple[State, str] | None = None
        resumed = self.checkpointer.resume()
        if resumed is not None:
            self.kept = resumed.state, resumed.state_hash
            say(f"going on after epoch {resumed.state.epoch:,}")

        # The network first: its processes must not inherit the threads of what follows.
        dht = start_dht(
            role="auxiliary",
            host_addresses=[listening(recipe.peer.host, recipe.peer.port)],
            announce_addresses=list(recipe.peer.announce),
            identity_path=self.member.identity.path,
            **self.member.dht_options(),
        )
        own = recipe.model_copy(update={"peer": recipe.peer.model_copy(update={"role": "node"})})
        try:
            terms = len(Objective(network).terms)
            self.transport = SwarmTransport(
                dht, transport_settings(own, self.folder), averaged(network, recipe, terms),
                self.member.guard(dht),
            )  # fmt: skip
        except BaseException:
            dht.shutdown()
            raise
        stack.callback(self.transport.leave)
        self.dht, self.published = dht, -float("inf")
        if self.kept is not None:
            self.transport.share_state(self.kept[0])

        self.store = stack.enter_context(MetricsStore(self.folder / METRICS_FILE))
        self.ledger = stack.enter_context(Ledger(self.folder / LEDGER_FILE))
        self.collector = Collector(
            self.store,
            RunFacts(
                recipe.name, target_batch=_target(recipe), epochs=recipe.schedule.steps,
                mode=recipe.collaboration.mode, recipe_digest=recipe.digest(),
                parameters=sum(one.numel() for one in network.parameters()),
            ),
            user_of=self._user_of,
            leaders=lambda: self.ledger.leaders(recipe.name),
            watch=Watch(active_s=recipe.coordinator.gone_s, poll_s=recipe.coordinator.poll_s),
        )  # fmt: skip
        self.users: dict[str, str] = {}
        self.run_file = self._serve(doors, prepared, stack)
        self._show_page(stack)

    # The doors

    def _member(self) -> Membership:
        member = membership(
            self.folder, self.recipe.name, tuple(self.authority.public_keys().values()),
            authorised=self.recipe.swarm.authorisation,
        )  # fmt: skip
        if member.trust is not None:
            if OWN_USER not in self.authority.state.users:
                self.authority.allow_add(OWN_USER)  # nobody needs that credential
            member.trust.offer(self.authority.revocations())
            self._renew(member)
        return member

    def _renew(self, member: Membership) -> None:
        """This coordinator's own token, which it gives itself."""
        peer = member.identity.peer_id
        member.token.write(self.authority.issue(OWN_USER, peer, life_s=_OWN_TOKEN_S))
        self.renewed = time.monotonic()

    def _serve(self, doors: Doors, prepared: Prepared, stack: contextlib.ExitStack) -> RunFile:
        """Give tokens, the run file and the tokenizer from now on; the run file."""
        recipe, path = self.recipe, self.folder / run_file.FILE
        server, listener = token_service.listen(
            self.authority,
            ServiceSettings(
                audit=self.folder / AUDIT_FILE, host=recipe.coordinator.host,
                port=recipe.coordinator.port, certificate=doors.certificate,
                private_key=doors.private_key, behind_proxy=doors.behind_proxy,
                token_life_s=60 * recipe.swarm.token_minutes, run_file=path,
            ),
            routes=join_routes.routes(Path(tokenizer_file(recipe.model.tokenizer))),
        )  # fmt: skip
        stack.callback(listener.close)
        host, port = listener.getsockname()[:2]
        scheme = "https" if doors.certificate else "http"
        shown = f"[{host}]" if ":" in host else host
        service = recipe.coordinator.url or f"{scheme}://{shown}:{port}"
        made = run_file.make(
            self.authority, recipe, prepared.identity, addresses=self._addresses(), service=service
        )
        made.write(path)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, name="service", daemon=True
        )
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(8.0)

        stack.callback(end)
        self.say(f"run file: {path}; join: gristmill swarm join {service} --user NAME ...")
        self.say(f"authority: {made.authority[0]}")
        return made

    def _addresses(self) -> list[str]:
        """Where peers enter: what was announced, else all but this machine's own loopback."""
        found = [str(address) for address in self.dht.get_visible_maddrs()]
        outside = [one for one in found if "/127.0.0.1/" not in one and "/::1/" not in one]
        return outside or found

    def _show_page(self, stack: contextlib.ExitStack) -> None:
        settings = self.recipe.coordinator
        page = stack.enter_context(
            Dashboard(
                self.folder / METRICS_FILE, host=settings.page_host, port=settings.page_port,
                active_s=settings.gone_s,
            )
        )  # fmt: skip
        self.say(f"page: {page.url}")

    # Work

    def work(self) -> dict[str, Any]:
        """Look, write, until the end."""
        steps, poll_s = self.recipe.schedule.steps, self.recipe.coordinator.poll_s
        with contextlib.suppress(Leave):
            return self._watch(steps, poll_s)
        return self._summary("stopped")

    def _watch(self, steps: int, poll_s: float) -> dict[str, Any]:
        finished_at: float | None = None
        while not self.stop.requested:
            now = time.time()
            said = self._look(now)
            self._keep_open()
            trainers = [one for one in said if one.peer.role != "auxiliary"]
            self._announce(trainers)
            done = self.kept is not None and self.kept[0].epoch >= steps
            if done and finished_at is None:
                finished_at = time.monotonic()
                self.collector.finish(now)
                self.say(f"finished: epoch {steps:,}")
            if finished_at is not None and (
                not trainers or time.monotonic() - finished_at > _GOODBYE_S
            ):
                return self._summary("finished")
            time.sleep(poll_s)
        return self._summary("stopped")

    def _look(self, now: float) -> list[Announcement]:
        """Take in what the peers say; a checkpoint where one is due."""
        own = self.member.identity.peer_id
        said = [one for one in self.transport.announcements() if one.peer.peer_id != own]
        self._learn_users()
        epoch = max((one.epoch for one in said), default=0)
        for one in said:
            self.ledger.see(self.recipe.name, one.peer.peer_id, one.rate, now)
        for told in rounds_told.heard(self._records(rounds_told.dht_key(self.recipe.name))):
            with contextlib.suppress(Untrusted):
                if self.ledger.add(told.receipt.text, run=self.recipe.name, epoch=epoch, now=now):
                    self.collector.round(told.result(), told.receipt.signer, now=now)
        for alarm in self.collector.look(said, now):
            self.say(f"alarm: {alarm.text}")
        self._hold(said, now)
        row = self.checkpointer.look(said, now)
        if row is not None:
            self.store.add_checkpoint(row)
            self.say(f"checkpoint of epoch {row.epoch:,}: {row.votes} of {row.active} peers agree")
        self.collector.ring("checkpoint", self.checkpointer.trouble)
        return said

    def _hold(self, said: Sequence[Announcement], now: float) -> None:
        """Download the weights of an epoch whose checkpoint is due, while peers have them."""
        votes = Counter(
            (one.epoch, one.state_hash)
            for one in said
            if one.state_hash and one.peer.role != "auxiliary"
        )
        for (epoch, state_hash), _ in votes.most_common():
            last = epoch >= self.recipe.schedule.steps
            newer = self.kept is None or epoch > self.kept[0].epoch
            if not newer or not (self.checkpointer.due(epoch) or last):
                continue
            try:
                state = self.transport.download_state(
                    expected_hash=state_hash, timeout_s=_DOWNLOAD_S
                )
            except NoState as error:
                self.collector.ring("download", f"No copy of epoch {epoch}: {error}")
                continue
            self.collector.ring("download", None)
            samples = int(state.metadata.get("samples", 0))
            positions = samples * self.recipe.examples.sequence_length
            counters = {"examples": samples, "tokens": positions}
            self.checkpointer.hold(state, state_hash, counters=counters, now=now)
            self.kept = state, state_hash
            self.transport.share_state(state)
            return

    def _announce(self, trainers: Sequence[Announcement]) -> None:
        """Offer the kept weights, while no peer is past them."""
        epoch, state_hash = 0, ""
        if self.kept is not None and all(one.epoch <= self.kept[0].epoch for one in trainers):
            epoch, state_hash = self.kept[0].epoch, self.kept[1]
        peer_id = self.member.identity.peer_id
        self.transport.announce(
            Announcement(
                PeerInfo(peer_id, name_of(self.recipe), "auxiliary", "coordinator"),
                epoch, 0, 0.0, state_hash, time.time(), None, 0,
            )
        )  # fmt: skip

    def _keep_open(self) -> None:
        """This coordinator's own token and the revocations, for peers that do not reach the
        service."""
        trust = self.member.trust
        if trust is None or time.monotonic() - self.published < _PUBLISH_S:
            return
        from training.swarm import guard  # noqa: PLC0415

        self.published = time.monotonic()
        if time.monotonic() - self.renewed > _RENEW_S:
            self._renew(self.member)
        trust.offer(self.authority.revocations())
        guard.publish(self.dht, trust, self.member.token, self.member.identity.peer_id)
        revocation.publish(self.dht, trust)

    def _records(self, key: str) -> dict[str, Any]:
        try:
            found = self.dht.get(key, latest=True, return_future=True).result(timeout=10.0)
        except Exception as error:
            self.say(f"warning: the DHT does not answer: {type(error).__name__}")
            return {}
        if found is None or not isinstance(found.value, dict):
            return {}
        return {str(name): entry.value for name, entry in found.value.items()}

    def _learn_users(self) -> None:
        """Whose peer is whose, by the tokens in the DHT."""
        trust = self.member.trust
        if trust is None:
            return
        for peer_id, text in self._records(tokens_key(self.recipe.name)).items():
            with contextlib.suppress(Untrusted):
                user = trust.written_by(str(text), peer_id).user
                if self.users.get(peer_id) != user:
                    self.users[peer_id] = user
                    self.ledger.know(peer_id, user)

    def _user_of(self, peer_id: str) -> str | None:
        return self.users.get(peer_id)

    def _summary(self, status: str) -> dict[str, Any]:
        epoch, state_hash = (self.kept[0].epoch, self.kept[1]) if self.kept else (0, "")
        model = self.folder / run_folder.MODEL_FOLDER
        return {
            "status": status,
            "run": self.recipe.name,
            "epoch": epoch,
            "epochs": self.recipe.schedule.steps,
            "state_hash": state_hash,
            "model": str(model) if model.exists() else None,
            "directory": str(self.folder),
        }


def _target(recipe: SwarmRecipe) -> int:
    """Samples of an epoch; under DiLoCo those of one peer's local steps."""
    settings = recipe.settings()
    if settings.mode == "diloco":
        return int(settings.diloco.local_batch or 0) * settings.diloco.local_steps
    return settings.target_batch
