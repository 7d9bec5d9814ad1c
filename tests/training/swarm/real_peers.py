"""Real peers of a swarm on this machine, each a process of its own that a test gives orders to.

`python real_peers.py FOLDER COUNT` imports hivemind once and forks COUNT idle processes; each
listens on a socket in FOLDER and becomes a peer at its first order. A process group per peer, so
that a test can kill one with all its children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

RUN = "testrun"
VALUES = 70_000
SHAPES = ((VALUES,), (30, 50), (1,))
START_S = 120.0


class BannedGuard:
    """Refuses the peers whose ids stand in a file, which the test may write at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def allowed(self, peer_id: str) -> bool:
        return not self._path.exists() or peer_id not in self._path.read_text().split()


class Served:
    """What a peer does for its test: each public method is an order."""

    def start(self, folder: str, first: list[str], options: dict[str, Any]) -> dict[str, Any]:
        import torch

        return self._start(folder, first, options, [torch.zeros(shape) for shape in SHAPES])

    def _start(
        self, folder: str, first: list[str], options: dict[str, Any], tensors: list[Any]
    ) -> dict[str, Any]:
        import torch

        from training.swarm.transport import SwarmTransport, TransportSettings, start_dht

        torch.set_num_threads(1)
        path = Path(folder)
        self.settings = TransportSettings(
            run=RUN,
            folder=path,
            **{
                "codec": "none",
                "matchmaking_s": 1.0,
                "sender_timeout_s": 5.0,
                "allreduce_timeout_s": 30.0,
                "exclusion_s": 5.0,
                "part_bytes": 1 << 15,
                **options,
            },
        )
        self.dht = start_dht(
            first, role=self.settings.role, host_addresses=["/ip4/127.0.0.1/tcp/0"]
        )
        guard = BannedGuard(path / "banned")
        self.transport = SwarmTransport(self.dht, self.settings, tensors, guard)
        addresses = [str(address) for address in self.dht.get_visible_maddrs()]
        return {"peer_id": self.transport.peer_id, "addresses": addresses}

    def learn(
        self, folder: str, first: list[str], options: dict[str, Any], task: dict[str, Any]
    ) -> dict[str, Any]:
        """Start, and learn in a thread (`learning_peers.Learning` of `task`)."""
        import torch

        from tests.training.swarm.learning_peers import Learning, learner
        from training.swarm.heartbeat import Heartbeat

        objective = learner()
        one = [] if task["settings"].get("mode") == "diloco" else objective.terms[1:]
        tensors = [
            torch.zeros(parameter.shape)
            for _ in range(1 + len(one))
            for parameter in objective.network.parameters()
        ]
        started = self._start(folder, first, options, tensors)
        heartbeat = Heartbeat(self.transport, every_s=2.0, longest_s=60.0)
        heartbeat.start()
        self.learning = Learning(heartbeat, role=self.settings.role, **task)
        return started

    def told(self) -> Any:
        """What it tells of its learning so far."""
        return self.learning.told()

    def hold(self, place: str) -> None:
        """Stop it at the next `place`."""
        self.learning.hold(place)

    def release(self) -> None:
        """Let it go on."""
        self.learning.release()

    def end_learning(self) -> Any:
        """Stop it; the last that it tells."""
        return self.learning.end()

    def average(self, value: float, weight: float, epoch: int, timeout_s: float) -> Any:
        """The RoundResult, and the tensors after it; `value` times 1, 2, 3, ... is averaged."""
        tensors = tensors_of(value)
        result = self.transport.average(
            tensors,
            weight=weight,
            epoch=epoch,
            gathered={"samples": int(weight), "state_hash": "0" * 64},
            timeout_s=timeout_s,
        )
        return result, [tensor.numpy() for tensor in tensors]

    def leave_out(self, peer_id: str) -> None:
        self.transport.leave_out(peer_id)

    def poison(self, how: str) -> None:
        """From now on this peer sends NaN ("nan"), or is killed at its second part ("die")."""
        self.transport._averager.ask("poison", how=how).result(timeout=10)

    def announce(self, epoch: int, state_hash: str) -> None:
        from training.swarm.types import Announcement, PeerInfo

        info = PeerInfo(self.transport.peer_id, "test", self.settings.role, "cpu")
        self.transport.announce(
            Announcement(info, epoch, 3, 1.5, state_hash, time.time(), None, 1 << 20)
        )

    def announcements(self) -> Any:
        return self.transport.announcements()

    def share(self, seed: int, values: int) -> str:
        return self.transport.share_state(state_of(seed, values))

    def download(self, expected_hash: str | None, timeout_s: float) -> tuple[str, int]:
        """The hash of what was downloaded, computed anew, and its epoch."""
        from training.swarm.state import state_hash

        state = self.transport.download_state(expected_hash=expected_hash, timeout_s=timeout_s)
        return state_hash(state), state.epoch

    def pid_of(self, child: str) -> int:
        """The process "dht" or "averager"."""
        pid: int = {"dht": self.dht, "averager": self.transport._averager}[child].pid
        return pid

    def children(self) -> list[int]:
        """All processes below this one."""
        return descendants(os.getpid())

    def leave(self) -> float:
        started = time.monotonic()
        self.transport.leave()
        return time.monotonic() - started


def tensors_of(value: float) -> list[Any]:
    import torch

    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    return [
        torch.arange(1, size + 1).float().mul(value / size).reshape(shape)
        for size, shape in zip(sizes, SHAPES, strict=True)
    ]


def state_of(seed: int, values: int) -> Any:
    import torch

    from training.swarm.types import State

    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "network.weight": torch.randn(values, generator=generator),
        "optimiser.weight.step": torch.tensor(float(seed)),
    }
    return State(seed, tensors, {"position": seed})


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return False


class Peer:
    """The test's end of a peer."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder / f"peer-{number}"
        self.folder.mkdir(exist_ok=True)
        self._address = str(folder / f"{number}.socket")
        deadline = time.monotonic() + START_S
        while not Path(self._address).exists():
            assert time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.05)
        self._connection: Connection = Client(self._address)
        self.pid = self._connection.recv()
        self.peer_id = ""
        self.addresses: list[str] = []

    def begin(self, order: str, *arguments: Any) -> None:
        self._connection.send((order, arguments))

    def end(self) -> Any:
        is_good, value = self._connection.recv()
        if not is_good:
            raise value
        return value

    def do(self, order: str, *arguments: Any) -> Any:
        self.begin(order, *arguments)
        return self.end()

    def begin_start(self, first: list[str], **options: Any) -> None:
        self.begin("start", str(self.folder), first, options)

    def begin_learn(self, first: list[str], options: dict[str, Any], **task: Any) -> None:
        self.begin("learn", str(self.folder), first, options, task)

    def end_start(self) -> None:
        told = self.end()
        self.peer_id, self.addresses = told["peer_id"], told["addresses"]

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)

    def freeze(self, *, thaw: bool = False) -> None:
        os.killpg(self.pid, signal.SIGCONT if thaw else signal.SIGSTOP)


@contextlib.contextmanager
def hub(folder: Path, count: int, script: str = __file__) -> Iterator[list[Peer]]:
    """Some idle peers of `script`; all their processes are gone at the end."""
    repository = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, script, str(folder), str(count)],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    peers: list[Peer] = []
    try:
        peers.extend(Peer(folder, number) for number in range(count))
        yield peers
    finally:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.freeze(thaw=True)
                peer.kill()
        process.kill()
        process.wait()


def _serve(folder: Path, number: int) -> None:
    from hivemind.utils.mpfuture import MPFuture

    os.setsid()
    # hivemind makes its locks when it is imported: peers of one fork would share them, and who is
    # killed while it holds one would stop all others.
    MPFuture.reset_backend()
    with Listener(str(folder / f"{number}.socket")) as listener, listener.accept() as connection:
        connection.send(os.getpid())
        served = Served()
        while True:
            try:
                order, arguments = connection.recv()
            except EOFError:
                return
            try:
                answer = (True, getattr(served, order)(*arguments))
            except Exception as error:
                answer = (False, error)
            connection.send(answer)


def _poisonable() -> None:
    """Teach the averagers of this process tree to misbehave, when they are told to."""
    import torch
    from hivemind.averaging.partition import TensorPartContainer

    from training.swarm.averager import RoundAverager

    async def poison(self: Any, *, future: Any, how: str) -> None:
        original = TensorPartContainer.iterate_input_parts_for

        async def iterate(container: Any, peer_index: int) -> Any:
            number = 0
            async for message in original(container, peer_index):
                if how == "nan":
                    values = torch.frombuffer(bytearray(message.buffer), dtype=torch.float32)
                    values[0] = torch.nan
                    message.buffer = values.numpy().tobytes()
                elif number == 1:
                    os.killpg(0, signal.SIGKILL)
                number += 1
                yield message

        TensorPartContainer.iterate_input_parts_for = iterate
        future.set_result(None)

    RoundAverager._poison = poison  # type: ignore[attr-defined]


def main() -> None:
    """The hub: imports once, forks the idle peers, waits for them."""
    from tests.training.swarm import learning_peers
    from training.swarm import transport

    assert transport and learning_peers
    _poisonable()
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    for number in range(count):
        if os.fork() == 0:
            try:
                _serve(folder, number)
            finally:
                os._exit(0)
    for _ in range(count):
        os.wait()


if __name__ == "__main__":
    main()
