"""`gristmill swarm`: mistakes in one line, the plan, the allowlist, tokens, status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.cli import main
from tests.training.corpora import make_corpus, random_pages
from tests.training.swarm.watched_runs import FACTS, announcement
from tests.training.tiny_runs import Place, make_place
from training.prepare import prepare
from training.swarm import identity, run_file, tokens
from training.swarm.authority import Authority
from training.swarm.collector import Collector
from training.swarm.dashboard import Dashboard
from training.swarm.metrics_store import FILE, MetricsStore
from training.swarm.recipe import load_recipe

NOW = 1_900_000_000.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("crawl"))


@pytest.fixture(scope="module")
def run(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was started once: its authority and its run file."""
    folder = tmp_path_factory.mktemp("run")
    authority = Authority.create(folder / "authority", "sahajbert-small")
    recipe = load_recipe("sahajbert-small", overrides(place, folder))
    made = run_file.make(authority, recipe, prepare(recipe).identity, addresses=[])
    made.write(folder / run_file.FILE)
    return folder


def overrides(place: Place, folder: Path) -> list[str]:
    return [f"data.manifests={json.dumps(place.manifest)}", "data.languages=[]",
            f"model.tokenizer={json.dumps(place.tokenizer)}",
            f"output.directory={json.dumps(str(folder))}"]  # fmt: skip


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Path]:
    """The folder of a coordinator that has seen one peer."""
    with MetricsStore(tmp_path / FILE) as store:
        collector = Collector(store, FACTS, now=NOW)
        collector.look([announcement("QmA", 3, 40, time=NOW, name="anna")], NOW)
        yield tmp_path


def one_line(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    assert main(["swarm", *words]) == code
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1, told
    return told[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jion", "x"], "'gristmill swarm' has no action 'jion': did you mean 'join'?"),
        (["join", "x", "--uzer", "a"], "has no option '--uzer': did you mean '--user'?"),
        (["start", "nothing"], "no recipe 'nothing'"),
        (["start", "sahajbert-small"], "no output folder"),
        (["start", "sahajbert-small", "--set", "swarm.codec=x"], "swarm.codec = 'x'"),
        (["join", "/nowhere/run.json", "--output", "OUT"], "cannot be read (No such file"),
        (["join", "x"], "give --output DIR"),
        (["doctor", "/nowhere/run.json"], "cannot be read"),
        (["status", "/nowhere"], "is not there"),
        (["status", "http://127.0.0.1:1"], "does not answer (ConnectionError)"),
        (["allow", "list", "--run", "/nowhere"], "is no folder of a run"),
        (["token", "a", "b", "--run", "/nowhere", "--output", "x"], "is no folder of a run"),
    ],
)
def test_mistakes(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    assert message in one_line(words, capsys)


def test_the_plan(place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["swarm", "start", "sahajbert-small", "--dry-run", "--json"]
    for override in overrides(place, tmp_path / "out"):
        words += ["--set", override]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["samples_of_an_epoch"] == 512
    assert found["plan"]["round_bytes"] == 2 * found["plan"]["parameters"]
    assert found["recipe"]["name"] == "sahajbert-small"
    assert not (tmp_path / "out").exists()


def test_the_allowlist(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def allow(*words: str) -> str:
        assert main(["swarm", "allow", *words, "--run", str(run)]) == 0
        return capsys.readouterr().out

    assert allow("list").startswith("nobody is on the list")
    credential = allow("add", "asha").strip()
    state = Authority.load(run / "authority").state
    assert state.admits("asha", credential)
    assert allow("list").split()[0] == "asha"
    other = json.loads(allow("renew", "asha", "--json"))["credential"]
    state = Authority.load(run / "authority").state
    assert (state.admits("asha", credential), state.admits("asha", other)) == (False, True)
    assert allow("revoke", "asha") == "revoke: user 'asha'\n"
    assert allow("remove", "asha") == "remove: 'asha'\n"
    assert "nobody" in allow("list")
    assert len(Authority.load(run / "authority").public_keys()) == 1
    new = json.loads(allow("rotate", "--json"))["name"]
    assert new in Authority.load(run / "authority").public_keys()
    allow("retire", new)
    assert new not in Authority.load(run / "authority").public_keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["add"], "'swarm allow add' needs a name"), (["list", "x"], "takes no name: leave 'x' out"),
     (["remove", "nobody"], "is not on the allowlist"), (["add", "a b"], "is no name of a user"),
     (["retire", "x"], "is no key of"), (["revoke", "y"], "neither a user")],
)  # fmt: skip
def test_mistakes_in_the_allowlist(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in one_line(["allow", *words, "--run", str(run)], capsys)


def test_a_token_in_a_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "allow", "add", "ravi", "--run", str(run)]) == 0
    peer = identity.load_or_create(tmp_path / "identity.key").peer_id
    words = ["token", "ravi", peer, "--run", str(run), "--days", "3", "--output",
             str(tmp_path / "t")]  # fmt: skip
    assert main(["swarm", *words]) == 0
    trusted = Authority.load(run / "authority").public_keys()
    found = tokens.read((tmp_path / "t").read_text().strip(), trusted)
    assert (found.user, found.peer, found.expires - found.issued) == ("ravi", peer, 3 * 86_400)
    capsys.readouterr()
    assert "is no peer id" in one_line(["token", "ravi", "Qm", *words[3:]], capsys)


def joining(run: Path, place: Place, output: Path, *words: str) -> list[str]:
    return ["join", str(run / "run.json"), "--data", place.manifest, "--tokenizer", place.tokenizer,
            "--output", str(output), *words]  # fmt: skip


def test_who_may_not_join(
    run: Path, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (key,) = Authority.load(run / "authority").public_keys().values()
    pinned = ("--authority", key)

    def told(*words: str) -> str:
        return one_line(joining(run, place, tmp_path / "peer", *pinned, *words), capsys)

    peer = identity.load_or_create(tmp_path / "peer" / "identity.key").peer_id
    assert f"made for this peer: '{peer}'" in told()
    assert "--user and --credential belong together" in told("--user", "asha")
    assert "has no service that gives tokens" in told("--user", "a", "--credential", "x")
    assert "holds no token" in told("--token", str(tmp_path / "none"))
    assert "schedule.steps = '7000' is '200'" in told("--set", "schedule.steps=7000")
    assert "peer.role" in told("--set", "peer.role=king")
    other = "ed25519:" + "A" * 43
    assert "an authority that you trust" in one_line(
        joining(run, place, tmp_path / "peer", "--authority", other), capsys
    )
    assert "is the folder of `swarm start`" in one_line(joining(run, place, run), capsys)
    words = ["join", str(run), "--output", str(tmp_path / "peer"), *pinned]
    assert "no data: name the run's mined crawls" in one_line(words, capsys)


def test_the_doctor_without_a_coordinator(
    run: Path, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = joining(run, place, tmp_path / "peer", "--role", "client", "--json")[1:]
    assert main(["swarm", "doctor", *words]) == 1  # the run file names no address
    found = {one["name"]: one["state"] for one in json.loads(capsys.readouterr().out)}
    assert found == {
        "versions": "ok", "network daemon": "ok", "codec": "ok", "shared memory": "ok",
        "clock": "skipped", "way in": "failed", "reachable": "skipped", "bandwidth": "skipped",
        "inputs": "ok",
    }  # fmt: skip


def test_the_doctor_sees_other_data(
    run: Path, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_corpus(tmp_path / "crawl", {"bn": random_pages(60, seed=9)})
    words = joining(run, Place(other, place.tokenizer), tmp_path / "peer")
    assert main(["swarm", "doctor", *words[1:]]) == 1
    assert "FAILED  inputs: the crawls have manifests of SHA-256" in capsys.readouterr().out


def test_status_of_a_folder(watched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "status", str(watched), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["epoch"], found["progress"]["samples"]) == (3, 40)
    assert main(["swarm", "status", str(watched)]) == 0
    assert "run 'sahajbert': epoch 3 of 1,000, 40 of 400 samples" in capsys.readouterr().out


def test_status_of_a_page(watched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Dashboard(watched / FILE, active_s=1e12) as page:
        assert main(["swarm", "status", page.url]) == 0
        assert "anna" in capsys.readouterr().out
        wrong = one_line(["status", f"{page.url}nothing"], capsys)
    assert "is no page of a swarm (HTTP 404)" in wrong


@pytest.mark.parametrize("action", ["start", "join", "doctor", "status", "allow", "token"])
def test_help_shows_an_example(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["swarm", action, "--help"])
    assert ended.value.code == 0
    assert f"example: gristmill swarm {action} " in " ".join(capsys.readouterr().out.split())
