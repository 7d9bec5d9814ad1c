"""A run that nobody could join by what its run file says is not started."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.errors import UserError
from training.swarm.coordinator import Doors, check_doors
from training.swarm.peer import transport_settings
from training.swarm.recipe import load_recipe

ANYWHERE = "coordinator.host=0.0.0.0"
PROXY = Doors(behind_proxy=True)


@pytest.mark.parametrize(
    ("overrides", "doors", "said"),
    [
        ([ANYWHERE], Doors(), "coordinator.host = '0.0.0.0', which is no address"),
        (["coordinator.host='::'"], Doors(), "which is no address"),
        ([], PROXY, "give the address that the proxy answers to"),
        (["coordinator.url=swarm.example.org"], PROXY, "is no address of a token service"),
        (["coordinator.url=http://swarm.example.org"], PROXY, "is not https"),
        (
            ["coordinator.proxies=['proxy.example.org']"],
            Doors(),
            "coordinator.proxies holds 'proxy.example.org', which is no IP address or network",
        ),
    ],
)
def test_what_is_refused(overrides: list[str], doors: Doors, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        check_doors(load_recipe("sahajbert-small", overrides), doors)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "doors"),
    [
        ([], Doors()),
        (["coordinator.url=https://swarm.example.org"], PROXY),
        ([ANYWHERE, "coordinator.url=https://swarm.example.org:8470"], Doors()),
        (["coordinator.proxies=['172.17.0.1', '172.18.0.0/16']"], Doors()),
    ],
)
def test_what_is_good(overrides: list[str], doors: Doors) -> None:
    check_doors(load_recipe("sahajbert-small", overrides), doors)


@pytest.mark.parametrize(
    "override",
    ["run.max_skipped_steps=3", "run.log_every=5", "run.tensorboard=false",
     "run.pipeline.stages_per_rank=2"],
)  # fmt: skip
def test_what_a_swarm_does_not_read_is_refused(override: str) -> None:
    with pytest.raises(UserError, match="means nothing in a swarm") as refused:
        load_recipe("sahajbert-small", [override])
    assert "\n" not in str(refused.value)


def test_a_group_gathers_for_less_than_one_searches() -> None:
    chosen = ["swarm.matchmaking_s=70", "collaboration.round_timeout_s=60"]
    with pytest.raises(UserError, match="round_timeout_s = '60' is too short") as refused:
        load_recipe("sahajbert-small", chosen)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "samples"),
    [
        ([], 512),
        (["collaboration.mode=diloco", "collaboration.diloco.local_steps=500",
          "batch.samples=4096"], 500 * 4096),
    ],
)  # fmt: skip
def test_no_peer_may_give_more_than_two_epochs(
    overrides: list[str], samples: int, tmp_path: Path
) -> None:
    recipe = load_recipe("sahajbert-small", overrides)
    assert transport_settings(recipe, tmp_path).weight_cap == 2 * samples
