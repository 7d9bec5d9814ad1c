"""The run file: signed, pinned, and what a peer may not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from training.swarm import keys, run_file
from training.swarm.authority import Authority
from training.swarm.keys import SigningKey, Untrusted
from training.swarm.recipe import SwarmRecipe, load_recipe
from training.swarm.run_file import RunFile

PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}"
INPUTS: dict[str, Any] = {
    "recipe_digest": "d",
    "recipe": {},
    "tokenizer_sha256": "ab" * 32,
    "sources": [{"manifest_sha256": "cd" * 32, "recipe_digest": "e"}],
    "domains": {"bn": 1.0},
    "init_sha256": None,
}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority") / "a", "sahajbert-small")


def recipe(*overrides: str) -> SwarmRecipe:
    return load_recipe("sahajbert-small", list(overrides))


def made(authority: Authority, *overrides: str) -> RunFile:
    return run_file.make(authority, recipe(*overrides), INPUTS, addresses=[ADDRESS],
                         service="https://swarm.example.org")  # fmt: skip


def test_what_is_written_is_read(authority: Authority, tmp_path: Path) -> None:
    first = made(authority)
    first.write(tmp_path / "run.json")
    found = run_file.read(str(tmp_path / "run.json"))
    assert found == first
    assert found == run_file.read(str(tmp_path))
    assert (found.run, found.addresses, found.service) == (
        "sahajbert-small", (ADDRESS,), "https://swarm.example.org",
    )  # fmt: skip
    assert found.inputs == INPUTS
    assert run_file.joined(found, []) == recipe()


@pytest.mark.parametrize("field", ["run", "recipe", "addresses", "service", "digest", "inputs"])
def test_any_change_is_noticed(authority: Authority, field: str) -> None:
    document = json.loads(made(authority).sealed)
    value = document["body"][field]
    document["body"][field] = [*value, ADDRESS] if isinstance(value, list) else f"{value} "
    with pytest.raises(Untrusted):
        run_file.parse(keys.canonical(document), "x")


def test_a_pinned_key(authority: Authority, tmp_path: Path) -> None:
    made(authority).write(tmp_path / "run.json")
    place = str(tmp_path / "run.json")
    (own,) = authority.public_keys().values()
    assert run_file.read(place, pinned=[own]).run == "sahajbert-small"
    with pytest.raises(UserError, match="not the run file of an authority that you trust"):
        run_file.read(place, pinned=[SigningKey.new().public])


def test_the_first_key_is_remembered(authority: Authority, tmp_path: Path) -> None:
    known = made(authority)
    other = Authority.create(tmp_path / "b", "sahajbert-small")
    run_file.make(other, recipe(), INPUTS, addresses=[ADDRESS]).write(tmp_path / "run.json")
    place = str(tmp_path / "run.json")
    assert run_file.read(place).authority == tuple(other.public_keys().values())
    with pytest.raises(UserError, match="that you trust"):
        run_file.read(place, known=known)


def test_another_run_in_the_same_folder(authority: Authority, tmp_path: Path) -> None:
    known = made(authority)
    run_file.make(authority, recipe("name=other"), INPUTS, addresses=[]).write(tmp_path / "o.json")
    with pytest.raises(UserError, match="belongs to the run 'sahajbert-small'"):
        run_file.read(str(tmp_path / "o.json"), known=known)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.steps=7000", "schedule.steps = '7000' is '200' in the run 'sahajbert-small'"),
        ("collaboration.diloco.outer_momentum=0.5", "means nothing in mode = 'sync'"),
        ("collaboration.labels_per_sample=[1.0, 1.0]", "collaboration.labels_per_sample = '[1.0"),
        ("swarm.codec=none", "swarm.codec = 'none' is 'scaled-float16'"),
        ("name=mine", "name = 'mine' is 'sahajbert-small'"),
        ("data.seed=4", "data.seed = '4' is '0'"),
    ],
)
def test_what_a_peer_cannot_change(authority: Authority, override: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        run_file.joined(made(authority), [override])
    assert message in str(raised.value)


def test_what_a_peer_may_change(authority: Authority) -> None:
    found = run_file.joined(
        made(authority), ["batch.microbatch=3", "peer.role=client", "data.manifests=x",
                          "run.device=cpu", "output.directory=y", "data.cache_bytes=5"],
    )  # fmt: skip
    assert (found.batch.microbatch, found.peer.role, found.data.manifests) == (3, "client", ("x",))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokenizer_sha256", "00" * 32, "the tokenizer has the SHA-256 '000000000000…'"),
        ("sources", [], "the crawls have manifests of SHA-256"),
        ("domains", {"bn": 0.5, "hi": 0.5}, "the domains of the crawls are not those"),
        ("init_sha256", {"a": "b"}, "starts from other weights"),
    ],
)
def test_other_inputs(authority: Authority, field: str, value: Any, message: str) -> None:
    run_file.check_inputs(made(authority), INPUTS)
    with pytest.raises(UserError, match=message):
        run_file.check_inputs(made(authority), {**INPUTS, field: value})


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"body":{},"signatures":{}}', "[" * 9999])
def test_what_is_no_run_file(text: str, tmp_path: Path) -> None:
    place = tmp_path / "run.json"
    place.write_text(text)
    with pytest.raises(UserError, match="is no run file"):
        run_file.read(str(place))


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        run_file.read(str(tmp_path / "nothing.json"))
    with pytest.raises(UserError, match="not https"):
        run_file.read("http://swarm.example.org")


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b" " * (2 << 20))
    with pytest.raises(UserError, match="more than"):
        run_file.read(str(tmp_path / "run.json"))


def test_an_address_that_is_none(authority: Authority) -> None:
    with pytest.raises(UserError, match=r"'1\.2\.3\.4:5' is no address of a peer"):
        run_file.make(authority, recipe(), INPUTS, addresses=["1.2.3.4:5"])


def test_a_newer_version(authority: Authority) -> None:
    body = json.loads(made(authority).sealed)["body"]
    with pytest.raises(UserError, match="of version '2'"):
        run_file.parse(authority.seal(run_file.KIND, {**body, "version": 2}), "x")


def test_a_coordinator_with_other_settings(authority: Authority) -> None:
    body = json.loads(made(authority).sealed)["body"]
    found = run_file.parse(authority.seal(run_file.KIND, {**body, "digest": "0" * 32}), "x")
    with pytest.raises(UserError, match="install the version that the coordinator runs"):
        run_file.joined(found, [])


def test_a_weights_file_stands_in_it_by_what_it_says(authority: Authority, tmp_path: Path) -> None:
    weights = tmp_path / "weights.json"
    weights.write_text("{}")
    given = recipe("data.weights=" + json.dumps(str(weights)))
    shares = {"bn": 0.25, "en": 0.75}
    found = run_file.make(authority, given, {**INPUTS, "domains": shares}, addresses=[ADDRESS])
    assert str(tmp_path) not in found.sealed.decode()
    assert run_file.joined(found, []).data.weights == shares
    assert run_file.joined(found, ["data.manifests=['/other/crawl']"]).digest() == found.digest
    nearly = {"bn": 0.25 * (1 + 1e-15), "en": 0.75}
    run_file.check_inputs(found, {**INPUTS, "domains": nearly})
    with pytest.raises(UserError, match="the domains of the crawls are not those of the run"):
        run_file.check_inputs(found, {**INPUTS, "domains": {"bn": 0.3, "en": 0.7}})


@pytest.mark.parametrize(
    ("field", "value"),
    [("addresses", 5), ("addresses", [5]), ("issued", "x"), ("inputs", "{}"), ("inputs", "5"),
     ("recipe", "[]"), ("recipe", "{"), ("service", None), ("run", 1)],
)  # fmt: skip
def test_a_signed_file_of_wrong_kinds_is_one_line(
    authority: Authority, field: str, value: Any
) -> None:
    body = {**json.loads(made(authority).sealed)["body"], field: value}
    with pytest.raises(UserError, match=r"is no (run file|address of a peer)"):
        run_file.parse(authority.seal(run_file.KIND, body), "run.json")
