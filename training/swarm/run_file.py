"""The run file: what a peer needs to join a run, in one JSON document that the authority signed.

It holds the recipe (without what each peer chooses), the identity of the run's inputs (digests of
the crawls, the tokenizer, the mixture), the addresses to enter the network by, the address of the
service for tokens, and the authority's public keys. A peer that knows a key from elsewhere pins it
(`--authority`); without one the first file is believed, shown and remembered, as ssh does, and a
later one with other keys is refused.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import files
from models.errors import UserError
from pipelines import recipe_file
from training.swarm import keys
from training.swarm.bootstrap import check_address
from training.swarm.keys import Untrusted
from training.swarm.recipe import SwarmRecipe

if TYPE_CHECKING:
    from training.swarm.authority import Authority

KIND = "run file"
FILE = "run.json"
VERSION = 1
_MOST_BYTES = 1 << 20
_FIELDS = {"version", "run", "recipe", "digest", "inputs", "addresses", "authority", "service",
           "issued"}  # fmt: skip
_INPUTS = {"tokenizer_sha256", "sources", "domains", "init_sha256"}


@dataclass(frozen=True)
class RunFile:
    """A run file that was read and checked.

    recipe: as `SwarmRecipe.shared` gives it. inputs: as `training.identity` gives it. service: URL
    of the coordinator; "" where tokens are files. sealed: the document itself.
    """

    run: str
    recipe: Mapping[str, Any]
    digest: str
    inputs: Mapping[str, Any]
    addresses: tuple[str, ...]
    authority: tuple[str, ...]
    service: str
    issued: int
    sealed: bytes

    def write(self, path: Path) -> None:
        """Write the signed document."""
        files.write_atomic(path, self.sealed + b"\n")


def make(
    authority: Authority,
    recipe: SwarmRecipe,
    inputs: Mapping[str, Any],
    *,
    addresses: Sequence[str],
    service: str = "",
) -> RunFile:
    """The run file of `recipe`, signed by every key of the authority. Raises UserError.

    What a weights file says stands in it: that file is on the coordinator's disk alone.
    """
    if recipe.data.weights_file is not None:
        data = recipe.data.model_copy(update={"weights": dict(inputs["domains"])})
        recipe = recipe.model_copy(update={"data": data})
    for address in addresses:
        check_address(address)
    body = {
        "version": VERSION,
        "run": recipe.name,
        # As text: floats have no canonical form.
        "recipe": json.dumps(recipe.shared(), sort_keys=True),
        "digest": recipe.digest(),
        "inputs": json.dumps(inputs, sort_keys=True),
        "addresses": list(addresses),
        "authority": sorted(authority.public_keys().values()),
        "service": service,
        "issued": int(time.time()),
    }
    return parse(authority.seal(KIND, body), "the run file")


def read(
    place: str,
    *,
    pinned: Sequence[str] = (),
    known: RunFile | None = None,
    ca_file: Path | None = None,
) -> RunFile:
    """The run file at `place`: a path, or the URL of the coordinator's service.

    pinned: public keys one of which must have signed it. known: the one that this peer has joined
    by before; another run, or one that none of its keys signed, is refused. Raises UserError;
    Fault when the service does not answer.
    """
    trusted = list(pinned) or (list(known.authority) if known else [])
    try:
        found = parse(_fetch(place, ca_file), place, trusted=trusted)
    except Untrusted as error:
        raise UserError(
            f"'{place}' is not the run file of an authority that you trust: {error}; "
            "compare its key with the one that `gristmill swarm start` shows"
        ) from error
    if known is not None and known.run != found.run:
        raise UserError(
            f"this folder belongs to the run '{known.run}', and '{place}' is of the run "
            f"'{found.run}': give another folder with --output"
        )
    return found


def parse(data: bytes, place: str, *, trusted: Sequence[str] = ()) -> RunFile:
    """The run file in `data`. Without `trusted` it must be signed by a key that it names itself.

    Raises Untrusted for a signature that does not hold; UserError for all else.
    """
    text = data.strip()
    publics = list(trusted) or _own_keys(text, place)
    body = keys.unseal(KIND, text, keys.by_id(publics))
    if body.get("version") != VERSION:
        raise UserError(
            f"'{place}' is a run file of version '{body.get('version')}', this Gristmill reads "
            f"version {VERSION}: install the version that the coordinator runs"
        )
    if body.keys() != _FIELDS:
        wanted = ", ".join(sorted(_FIELDS))
        raise UserError(f"'{place}' is no run file: its fields are not {wanted}")
    try:
        recipe, inputs = json.loads(body["recipe"]), json.loads(body["inputs"])
        right = (
            isinstance(recipe, dict) and isinstance(inputs, dict) and inputs.keys() >= _INPUTS
            and isinstance(inputs["sources"], list) and isinstance(body["issued"], int)
            and all(isinstance(body[name], list) for name in ("addresses", "authority"))
            and all(isinstance(body[name], str) for name in ("run", "digest", "service"))
        )  # fmt: skip
    except (TypeError, ValueError):
        right = False
    if not right:
        raise UserError(f"'{place}' is no run file: its fields are not of their kinds")
    for address in body["addresses"]:
        check_address(address)
    return RunFile(
        run=str(body["run"]), recipe=recipe, digest=str(body["digest"]), inputs=inputs,
        addresses=tuple(body["addresses"]), authority=tuple(body["authority"]),
        service=str(body["service"]), issued=int(body["issued"]), sealed=text,
    )  # fmt: skip


def joined(run: RunFile, overrides: Sequence[str]) -> SwarmRecipe:
    """The recipe of a peer: the run's, with what the peer sets for itself.

    Raises UserError when that is something which all peers must share, or which an auxiliary peer
    would not read.
    """
    tree: dict[str, Any] = json.loads(json.dumps(run.recipe))
    recipe = recipe_file.validated(SwarmRecipe, tree, run.run, list(overrides))
    before = recipe_file.validated(
        SwarmRecipe, json.loads(json.dumps(run.recipe)), run.run, []
    )  # fmt: skip
    if recipe.digest() == run.digest and recipe.name == run.run:
        if recipe.peer.role == "auxiliary":
            _check_auxiliary(before, recipe)
        return recipe
    if before.digest() != run.digest:
        raise UserError(
            f"the run '{run.run}' was started by a Gristmill with other settings: install the "
            "version that the coordinator runs"
        )
    name, old, new = _first_difference(before.published(), recipe.published())
    raise UserError(
        f"{name} = '{new}' is '{old}' in the run '{run.run}', for all of its peers: leave it out"
    )


def _check_auxiliary(before: SwarmRecipe, recipe: SwarmRecipe) -> None:
    """Raises UserError for a setting of what an auxiliary peer does not do."""
    read: Any = {"peer": True, "coordinator": True, "output": True, "model": {"tokenizer"}}
    there, here = (one.model_dump(mode="json", exclude=read) for one in (before, recipe))
    if there == here:
        return
    name, _, value = _first_difference(there, here)
    option = "--data" if name == "data.manifests" else "it"
    raise UserError(
        f"{name} = '{value}' means nothing for an auxiliary peer, which reads no examples and "
        f"learns nothing: leave {option} out"
    )


def check_tokenizer(run: RunFile, digest: str) -> None:
    """Raises UserError when the tokenizer with this SHA-256 is not that of the run."""
    wanted = run.inputs["tokenizer_sha256"]
    if wanted != digest:
        raise UserError(
            f"the tokenizer has the SHA-256 '{digest[:12]}…', that of the run "
            f"'{run.run}' has '{wanted[:12]}…': give the run's with --tokenizer"
        )


def check_inputs(run: RunFile, current: Mapping[str, Any]) -> None:
    """Raises UserError, with what to do, when a peer's crawls, tokenizer or start are others.

    current: `training.identity.identity` of what this peer has.
    """
    there = run.inputs
    check_tokenizer(run, current["tokenizer_sha256"])
    if there["sources"] != current["sources"]:
        mine, theirs = (
            ", ".join(f"'{source['manifest_sha256'][:12]}…'" for source in one["sources"])
            for one in (current, there)
        )
        raise UserError(
            f"the crawls have manifests of SHA-256 {mine}, those of the run '{run.run}' {theirs}: "
            "give the run's, in its order, with --data"
        )
    if not _alike(there["domains"], current["domains"]):
        raise UserError(
            f"the domains of the crawls are not those of the run '{run.run}': give its crawls with "
            "--data"
        )
    if there["init_sha256"] != current["init_sha256"]:
        raise UserError(
            f"the run '{run.run}' starts from other weights: give the folder of its first model "
            "with --set model.init=DIR"
        )


def _alike(there: Mapping[str, float], here: Mapping[str, float]) -> bool:
    """Weights are numbers that were divided by their sum, here once more."""
    return there.keys() == here.keys() and all(
        math.isclose(weight, here[name], rel_tol=1e-9) for name, weight in there.items()
    )


def _own_keys(text: bytes, place: str) -> list[str]:
    try:
        found = keys.parsed(text)["body"]["authority"]
    except (Untrusted, KeyError, TypeError) as error:
        raise UserError(
            f"'{place}' is no run file: give what `gristmill swarm start` wrote, or its URL"
        ) from error
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise UserError(f"'{place}' is no run file: it names no key of an authority")
    return found


def _fetch(place: str, ca_file: Path | None) -> bytes:
    if not place.startswith(("http://", "https://")):
        path = Path(place)
        path = path / FILE if path.is_dir() else path
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise UserError(f"'{path}' is no run file: it has more than {_MOST_BYTES:,} bytes")
            return path.read_bytes()
        except OSError as error:
            raise UserError(
                f"'{path}' cannot be read ({error.strerror}): give a run file, or the URL that "
                "`gristmill swarm start` shows"
            ) from error
    from training.swarm.token_client import fetch_run  # noqa: PLC0415  # not for a file

    return fetch_run(place, ca_file)


def _first_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any]:
    for section, value in now.items():
        if not isinstance(value, dict):
            if before[section] != value:
                return section, before[section], value
            continue
        for name, one in value.items():
            old = before[section].get(name)
            if old != one:
                if isinstance(one, dict) and isinstance(old, dict):
                    inner, was, is_now = _first_difference(old, one)
                    return f"{section}.{name}.{inner}", was, is_now
                return f"{section}.{name}", old, one
    return "name", before.get("name"), now.get("name")
