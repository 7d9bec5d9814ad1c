"""The recipe of a swarm: what is shipped, what all peers share, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.errors import UserError
from pipelines import recipe_file
from training.swarm import codecs
from training.swarm.epoch_plan import parameters_of, plan_of
from training.swarm.recipe import SwarmRecipe, load_recipe, shipped_recipes

RECIPES = ["sahajbert", "sahajbert-small"]


def test_shipped_recipes() -> None:
    assert shipped_recipes() == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipe_is_valid(name: str) -> None:
    assert load_recipe(name).name == name


def test_sahajbert() -> None:
    found = load_recipe("sahajbert")
    assert parameters_of(found, 32_000) == 18_105_474
    assert (found.examples.sequence_length, found.examples.masking) == (512, "token")
    assert (found.optimiser.name, found.optimiser.learning_rate) == ("lamb", 1.76e-3)
    assert (found.optimiser.epsilon, found.optimiser.weight_decay) == (1e-6, 0.01)
    assert (found.schedule.warmup_steps, found.schedule.steps) == (5000, 1_000_000)
    assert found.settings().target_batch == 4096
    assert found.swarm.authorisation


def test_plan_of_sahajbert() -> None:
    # One gradient in float16: 36 MB, as in the paper.
    assert plan_of(load_recipe("sahajbert"), 32_000) == {
        "parameters": 18_105_474,
        "epochs": 1_000_000,
        "mode": "sync",
        "samples_of_an_epoch": 4096,
        "round_bytes": 36_210_948,
        "shortest_useful_epoch_s": "15.0",
    }
    parted = load_recipe("sahajbert", ["collaboration.labels_per_sample=[]"])
    assert plan_of(parted, 32_000)["round_bytes"] == 2 * 36_210_948


def test_the_batch_is_the_target() -> None:
    assert load_recipe("sahajbert-small").settings().target_batch == 512
    recipe = SwarmRecipe.model_validate(
        {"batch": {"tokens": 1000}, "examples": {"sequence_length": 64}}
    )
    assert recipe.settings().target_batch == 16


def test_diloco_has_one_batch() -> None:
    recipe = load_recipe(
        "sahajbert-small",
        ["collaboration.mode=diloco", "batch.samples=64", "collaboration.labels_per_sample=[]"],
    )
    assert recipe.settings().diloco.local_batch == 64
    assert plan_of(recipe, 1000)["samples_of_an_epoch"] == 64 * 500
    again = recipe_file.validated(SwarmRecipe, json.loads(json.dumps(recipe.shared())), "x", [])
    assert again.digest() == recipe.digest()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("collaboration.target_batch=64", "set batch.samples instead"),
        ("evaluation.every=5", "gristmill evaluate"),
        ("run.strategy=ddp", "choose auto or single"),
        ("swarm.codec=fp8", "swarm.codec = 'fp8'"),
        ("peer.role=helper", "'node', 'client' or 'auxiliary'"),
        ("name=a.b", "name = 'a.b'"),
        ("swarm.matchmaking=5", "did you mean 'matchmaking_s'?"),
        ("collaboration.min_peers=0", "collaboration.min_peers = '0'"),
    ],
)
def test_mistakes(override: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe("sahajbert-small", [override])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_diloco_with_two_batches() -> None:
    fields = ["collaboration.mode=diloco", "collaboration.diloco.local_batch=32",
              "collaboration.labels_per_sample=[]"]  # fmt: skip
    with pytest.raises(UserError, match=r"give batch\.samples alone"):
        load_recipe("sahajbert-small", fields)


def test_every_codec_has_a_name_here() -> None:
    for name in codecs.CODECS:
        assert load_recipe("sahajbert", [f"swarm.codec={name}"]).swarm.codec == name
    with pytest.raises(UserError, match="codec"):
        load_recipe("sahajbert", ["swarm.codec=float8"])


@pytest.mark.parametrize(
    "override",
    [
        "peer.role=client", "peer.role=auxiliary", "peer.up_mbit=5", "coordinator.port=1",
        "run.device=cpu", "batch.microbatch=1", "data.readers=2", "output.directory=x",
        "run.compile=true", "checkpoint.every=7",
    ],
)  # fmt: skip
def test_what_a_peer_chooses_is_not_in_the_digest(override: str) -> None:
    assert load_recipe("sahajbert", [override]).digest() == load_recipe("sahajbert").digest()


@pytest.mark.parametrize(
    "override",
    ["batch.samples=8", "schedule.steps=9000", "swarm.codec=none", "collaboration.min_peers=2",
     "optimiser.learning_rate=1", "swarm.authorisation=false"],
)  # fmt: skip
def test_what_all_share_is_in_the_digest(override: str) -> None:
    assert load_recipe("sahajbert", [override]).digest() != load_recipe("sahajbert").digest()


def test_what_is_shared_holds_no_place_of_this_machine(tmp_path: Path) -> None:
    here = str(tmp_path)
    recipe = load_recipe(
        "sahajbert",
        [f"data.manifests={json.dumps(here)}", f"model.tokenizer={json.dumps(here)}",
         f"output.directory={json.dumps(here)}", "peer.name=me", "coordinator.port=9"],
    )  # fmt: skip
    text = json.dumps(recipe.shared())
    assert here not in text
    assert '"peer"' not in text
    again = recipe_file.validated(SwarmRecipe, json.loads(text), "x", [])
    assert again.digest() == recipe.digest()


def test_crawls_with_a_url_are_shared() -> None:
    url = "https://example.org/mined"
    shared = load_recipe("sahajbert", [f"data.manifests={url}"]).shared()
    assert shared["data"]["manifests"] == [url]
