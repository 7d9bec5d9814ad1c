"""The coordinator of a swarm: the way in, the page, the checkpoints. It trains nothing.

It watches announcements and receipts (`collector`, `ledger`), serves the page, gives tokens to
allowed users (`upkeep`), and every `checkpoint.every` epochs downloads the weights that most peers
announce and writes them (`keeper`). When it is started again it has its run, its authority, its
newest checkpoint, its port, and the addresses of peers, whom it calls; peers that find nobody with
newer weights begin with its. The folder of a run:

    DIR/run.json        the signed run file
    DIR/authority/      keys and allowlist (`training.swarm.authority`)
    DIR/identity.key    its peer id, by which peers know the coordinator
    DIR/metrics.sqlite, ledger.sqlite   what the page shows
    DIR/audit.jsonl     who was given a token
    DIR/addresses.json  peers it has met
    DIR/checkpoints/    `training.swarm.checkpointer`; DIR/model/ the newest in transformers' form
"""

from __future__ import annotations

import contextlib
import ipaddress
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
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
from training.swarm import (
    bootstrap,
    join_routes,
    ports,
    reaching,
    rounds_told,
    run_file,
    token_service,
    upkeep,
)
from training.swarm.authority import Authority
from training.swarm.checkpointer import Checkpointer, Plan
from training.swarm.collector import Collector, Watch
from training.swarm.dashboard import Dashboard
from training.swarm.guard import OpenGuard
from training.swarm.keeper import Keeper, Kept
from training.swarm.keys import Untrusted
from training.swarm.leaving import Leave, interrupted
from training.swarm.ledger import FILE as LEDGER_FILE
from training.swarm.ledger import Ledger
from training.swarm.membership import Membership, Say, membership
from training.swarm.metrics_store import FILE as METRICS_FILE
from training.swarm.metrics_store import MetricsStore, RunFacts
from training.swarm.peer import (
    averaged,
    listening,
    name_of,
    samples_of_epoch,
    transport_settings,
)
from training.swarm.recipe import SwarmRecipe
from training.swarm.run_file import RunFile
from training.swarm.supervisor import EXIT_AGAIN
from training.swarm.token_client import check_url
from training.swarm.token_service import ServiceSettings
from training.swarm.tokens import dht_key as tokens_key
from training.swarm.transport import Gone, SwarmTransport, Taken, start_dht
from training.swarm.types import Announcement, PeerInfo
from training.swarm.upkeep import Upkeep

AUTHORITY_FOLDER = "authority"
AUDIT_FILE = "audit.jsonl"
_GOODBYE_S = 20.0
_MEET_S = 30.0
_ANYWHERE = ("0.0.0.0", "::", "")


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
    check_doors(recipe, doors)
    with StopRequest() as stop, placed(recipe.run), run_folder.held(str(folder)):
        prepared = prepare(recipe)
        authority = authority_of(folder, recipe.name)
        try:
            with contextlib.ExitStack() as stack, interrupted(stop):
                return _Coordinator(
                    recipe=recipe, prepared=prepared, authority=authority, doors=doors, stop=stop,
                    say=say, stack=stack,
                ).work()  # fmt: skip
        except Leave:  # before it had begun
            return {
                "status": "stopped", "run": recipe.name, "epoch": 0,
                "epochs": recipe.schedule.steps, "state_hash": "", "model": None,
                "directory": str(folder),
            }  # fmt: skip


def check_doors(recipe: SwarmRecipe, doors: Doors) -> None:
    """Raises UserError when no peer could reach the service by what the run file would say."""
    settings = recipe.coordinator
    for proxy in settings.proxies:
        check_proxy(proxy)
    if settings.url:
        check_url(settings.url)
    elif doors.behind_proxy:
        raise UserError(
            "coordinator.url = '' with --behind-proxy: give the address that the proxy answers to, "
            "--set coordinator.url=https://swarm.example.org"
        )
    elif settings.host in _ANYWHERE:
        raise UserError(
            f"coordinator.url = '' and coordinator.host = '{settings.host}', which is no address "
            "to call: --set coordinator.url=https://swarm.example.org:8470"
        )


def check_proxy(text: str) -> None:
    """Raises UserError when `text` is no address or network of a proxy."""
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise UserError(
            f"coordinator.proxies holds '{text}', which is no IP address or network: give the "
            "proxy's, as '172.17.0.1' or '172.17.0.0/16'"
        ) from None


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
        resumed = self.checkpointer.resume()
        if resumed is not None:
            say(f"going on after epoch {resumed.state.epoch:,}")

        # The network first: its processes must not inherit the threads of what follows.
        self.known = bootstrap.Known(self.folder / bootstrap.FILE)
        self.met_at, self.met = time.monotonic(), set[str]()
        dht = self._start_dht()
        own = recipe.model_copy(update={"peer": recipe.peer.model_copy(update={"role": "node"})})
        try:
            terms = len(Objective(network).terms)
            self.guard = self.member.guard(dht) or OpenGuard()
            self.transport = SwarmTransport(
                dht, transport_settings(own, self.folder), averaged(network, recipe, terms),
                self.guard,
            )  # fmt: skip
        except BaseException:
            dht.shutdown()
            raise
        stack.callback(self.transport.leave)
        self.dht = dht
        self.keeper = Keeper(
            self.checkpointer, self.transport, last=recipe.schedule.steps,
            length=recipe.examples.sequence_length, active_s=recipe.coordinator.gone_s,
            timeout_s=recipe.collaboration.download_timeout_s,
            kept=None if resumed is None else Kept(resumed.state, resumed.state_hash),
        )  # fmt: skip

        self.store = stack.enter_context(MetricsStore(self.folder / METRICS_FILE))
        self.ledger = stack.enter_context(Ledger(self.folder / LEDGER_FILE))
        self.collector = Collector(
            self.store,
            RunFacts(
                recipe.name, target_batch=samples_of_epoch(recipe), epochs=recipe.schedule.steps,
                mode=recipe.collaboration.mode, recipe_digest=recipe.digest(),
                parameters=sum(one.numel() for one in network.parameters()),
                matchmaking_s=recipe.swarm.matchmaking_s,
            ),
            user_of=self._user_of,
            leaders=lambda: self.ledger.leaders(recipe.name),
            watch=Watch(active_s=recipe.coordinator.gone_s, poll_s=recipe.coordinator.poll_s),
        )  # fmt: skip
        self.users, self.not_stored = dict[str, str](), ""
        self.announce([])  # before the service answers: who joins by it hears this peer
        self.upkeep = self._serve(doors, prepared, stack)
        self._show_page(doors, stack)

    def _start_dht(self) -> Any:
        """The DHT, by way of peers that were met before; at the port of the last time."""
        recipe = self.recipe
        ports.check(recipe.peer.host, recipe.peer.port)
        host, port = recipe.peer.host, recipe.peer.port or self._last_port()
        found = [one.address for one in bootstrap.try_all(self.known.addresses()) if not one.why]
        ways_in = bootstrap.candidates([], found, own_id=self.member.identity.peer_id)

        def started(by: Sequence[str]) -> Any:
            return start_dht(
                by,
                role="auxiliary",
                host_addresses=[listening(host, port)],
                announce_addresses=list(recipe.peer.announce),
                identity_path=self.member.identity.path,
                **self.member.dht_options(),
            )

        try:
            return started(ways_in)
        except UserError as error:
            if not ways_in or isinstance(error, Taken):
                raise
            self.say("the peers of the last time do not answer as such: starting without them")
            return started([])

    def _last_port(self) -> int:
        """The port of the run file, where it is this coordinator's and free; else 0."""
        try:
            made = run_file.parse((self.folder / run_file.FILE).read_bytes(), run_file.FILE)
            address = bootstrap.check_address(made.addresses[0])
            if address.peer_id != self.member.identity.peer_id:
                return 0
            return address.port if ports.is_free(self.recipe.peer.host, address.port) else 0
        except (OSError, UserError, Untrusted, IndexError):
            return 0

    # The doors

    def _member(self) -> Membership:
        member = membership(
            self.folder, self.recipe.name, tuple(self.authority.public_keys().values()),
            authorised=self.recipe.swarm.authorisation,
        )  # fmt: skip
        if member.trust is not None:
            member.trust.offer(self.authority.revocations())
            upkeep.renew(self.authority, member)
        return member

    def _serve(self, doors: Doors, prepared: Prepared, stack: contextlib.ExitStack) -> Upkeep:
        """Give tokens, the run file and the tokenizer from now on; what keeps them up to date."""
        recipe, path = self.recipe, self.folder / run_file.FILE
        server, listener = token_service.listen(
            self.authority,
            ServiceSettings(
                audit=self.folder / AUDIT_FILE, host=recipe.coordinator.host,
                port=recipe.coordinator.port, certificate=doors.certificate,
                private_key=doors.private_key, behind_proxy=doors.behind_proxy,
                proxies=tuple(recipe.coordinator.proxies),
                token_life_s=60 * recipe.swarm.token_minutes, run_file=path,
            ),
            routes=join_routes.routes(Path(tokenizer_file(recipe.model.tokenizer))),
        )  # fmt: skip
        stack.callback(listener.close)
        host, port = listener.getsockname()[:2]
        scheme = "https" if doors.certificate else "http"
        shown = f"[{host}]" if ":" in host else host
        service = recipe.coordinator.url or f"{scheme}://{shown}:{port}"
        addresses = self._addresses()

        def make() -> RunFile:
            return run_file.make(
                self.authority, recipe, prepared.identity, addresses=addresses, service=service
            )

        made = make()
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
        return Upkeep(self.authority, self.member, make=make, path=path)

    def _addresses(self) -> list[str]:
        """Where peers enter: what was announced, else all but this machine's own loopback."""
        found = [str(address) for address in self.dht.get_visible_maddrs()]
        outside = [one for one in found if "/127.0.0.1/" not in one and "/::1/" not in one]
        return outside or found

    def _show_page(self, doors: Doors, stack: contextlib.ExitStack) -> None:
        settings = self.recipe.coordinator
        page = stack.enter_context(
            Dashboard(
                self.folder / METRICS_FILE, host=settings.page_host, port=settings.page_port,
                active_s=settings.gone_s, any_host=doors.behind_proxy,
            )
        )  # fmt: skip
        self.say(f"page: {page.url}")

    # Work

    def work(self) -> dict[str, Any]:
        """Look, write, until the end."""
        steps, poll_s = self.recipe.schedule.steps, self.recipe.coordinator.poll_s
        try:
            return self._watch(steps, poll_s)
        except Leave:
            return self._summary("stopped")
        except Gone as error:
            self.say(f"{error}")
            return self._summary("lost") | {"exit_code": EXIT_AGAIN}

    def _watch(self, steps: int, poll_s: float) -> dict[str, Any]:
        finished_at: float | None = None
        while not self.stop.requested:
            now = time.time()
            trainers = self._look(now)
            self.upkeep.look(self.dht)
            self.announce(trainers)
            self._meet(trainers)
            if self.keeper.done and finished_at is None:
                finished_at = time.monotonic()
                self.say(f"finished: epoch {steps:,}")
            if finished_at is not None:
                with self._storing():
                    self.collector.finish(now)
                if not trainers or time.monotonic() - finished_at > _GOODBYE_S:
                    return self._summary("finished")
            time.sleep(poll_s)
        return self._summary("stopped")

    def _look(self, now: float) -> list[Announcement]:
        """Take in what the peers say; a checkpoint where one is due. Gives the trainers."""
        own = self.member.identity.peer_id
        said = [one for one in self.transport.announcements() if one.peer.peer_id != own]
        self._learn_users()
        with self._storing():
            self._count(said, now)
        row = self.keeper.look(said, now)
        if row is not None:
            self.say(f"checkpoint of epoch {row.epoch:,}: {row.votes} of {row.active} peers agree")
            with self._storing():
                self.store.add_checkpoint(row)
        self.collector.ring("checkpoint", self.keeper.trouble)
        self.collector.ring("upkeep", self.upkeep.trouble)
        return [one for one in said if one.peer.role != "auxiliary"]

    def _count(self, said: Sequence[Announcement], now: float) -> None:
        """Who was there and what each gave. An epoch is what most say, not what one says."""
        epoch = self.collector.epoch or 0
        for one in said:
            self.ledger.see(self.recipe.name, one.peer.peer_id, one.rate, now)
        records = self._records(rounds_told.dht_key(self.recipe.name))
        for told in rounds_told.heard(records, allowed=self.guard.allowed):
            with contextlib.suppress(Untrusted):
                if self.ledger.add(told.receipt.text, run=self.recipe.name, epoch=epoch, now=now):
                    self.collector.round(told.result(), told.receipt.signer, now=now)
        for alarm in self.collector.look(said, now):
            self.say(f"alarm: {alarm.text}")

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """A full disk costs the page its figures, not the run its coordinator."""
        try:
            yield
            self.not_stored = ""
        except sqlite3.Error as error:
            if str(error) != self.not_stored:
                self.not_stored = str(error)
                self.say(f"warning: figures of the page are not written: {error}")

    def announce(self, trainers: Sequence[Announcement]) -> None:
        """Offer the kept weights, while most peers are not past them."""
        kept = self.keeper.kept
        epoch, state_hash = 0, ""
        if kept is not None and (not trainers or (self.collector.epoch or 0) <= kept.state.epoch):
            epoch, state_hash = kept.state.epoch, kept.state_hash
        peer_id = self.member.identity.peer_id
        self.transport.announce(
            Announcement(
                PeerInfo(peer_id, name_of(self.recipe), "auxiliary", "coordinator"),
                epoch, 0, 0.0, state_hash, time.time(), None, 0,
            )
        )  # fmt: skip

    def _meet(self, trainers: Sequence[Announcement]) -> None:
        """Remember whom one has met; when alone, call those of before now and then."""
        there = {one.peer.peer_id for one in trainers}
        if time.monotonic() - self.met_at < _MEET_S and there <= self.met:
            return
        self.met_at, self.met = time.monotonic(), there
        if trainers:
            with contextlib.suppress(OSError):
                self.known.add(reaching.connected(self.dht))
            return
        known = bootstrap.candidates(
            [], self.known.addresses(), own_id=self.member.identity.peer_id
        )  # fmt: skip
        good = [one.address for one in bootstrap.try_all(known) if not one.why]
        if good:
            reaching.call(self.dht, good)

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
                user = trust.check(str(text), peer_id).user
                if self.users.get(peer_id) != user:
                    self.users[peer_id] = user
                    self.ledger.know(peer_id, user)

    def _user_of(self, peer_id: str) -> str | None:
        return self.users.get(peer_id)

    def _summary(self, status: str) -> dict[str, Any]:
        kept = self.keeper.kept
        model = self.folder / run_folder.MODEL_FOLDER
        return {
            "status": status,
            "run": self.recipe.name,
            "epoch": self.keeper.epoch,
            "epochs": self.recipe.schedule.steps,
            "state_hash": "" if kept is None else kept.state_hash,
            "model": str(model) if model.exists() else None,
            "directory": str(self.folder),
        }
