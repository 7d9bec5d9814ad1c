"""Whose an output folder is: the lock, the claim and the clean-up of one mining run.

The lock says that a run is at work; the claim (`run.json`) says which work an unfinished folder
belongs to, and where its staging files are. Both stand with the output, wherever the staging
files are.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from typing import Any

from models import files
from models.errors import Fault, UserError
from pipelines import lock
from pipelines.index import INDEX_FILE, index_xxh3
from pipelines.manifest import MANIFEST_FILE, read_manifest
from pipelines.plan import Plan
from pipelines.publish import DROPS_FILE, FAULTS_FILE, parts_in
from pipelines.recipe import MineRecipe
from pipelines.timings import TIMINGS_FILE

_CLAIM_FILE = "run.json"
_LOCK_FILE = "run.lock"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def claimed(plan: Plan, *, restart: bool) -> Iterator[None]:
    """Take the output folder for this run; one run at a time where the file system can lock.

    Raises UserError when another run is at work there, a folder cannot be written, or `restart`
    would throw away another run's index, Fault when the disk is full.
    """
    directory = plan.recipe.output.directory
    index_out = plan.recipe.dedup.index_out
    if restart:
        _check_index_out(plan)
    with contextlib.ExitStack() as stack:
        try:
            folders = [place for place in (index_out, plan.staging) if place is not None]
            for folder in (directory, *folders):
                _check_folder(folder)
            _lock(stack, plan)
            for folder in folders:
                if files.is_local(folder):
                    files.local_path(folder).mkdir(parents=True, exist_ok=True)
            sweep(plan)
            if restart:
                _throw_away(plan)
            claim = {"work": _work(plan), "staging": [plan.staging, *_other_staging(plan)]}
            text = json.dumps(claim, indent=1) + "\n"
            files.write_atomic(files.join(_folder(plan), _CLAIM_FILE), text)
            # Now that the claim says whose the parts are: a manifest that stands is not true any
            # more once they are made again.
            _remove(directory, MANIFEST_FILE)
            _remove(plan.staging, FAULTS_FILE)
            if index_out is not None:
                _remove(index_out, INDEX_FILE)
        except OSError as error:
            place = error.filename or directory
            what = f"output '{directory}' cannot be written ({error.strerror or error}: '{place}')"
            if error.errno in _NO_ROOM:
                raise Fault(f"{what}: make room and run the same command again") from None
            raise UserError(
                f"{what}: give folders that you may write to "
                "(--output, run.staging, dedup.index_out)"
            ) from None
        yield


def is_claimed(plan: Plan) -> bool:
    """Whether an unfinished run left its claim in the output folder."""
    return files.exists(files.join(_folder(plan), _CLAIM_FILE))


def is_ours(plan: Plan) -> bool:
    """Whether the claim that stands is of this very work."""
    return bool(_read_claim(plan).get("work") == _work(plan))


def clean_up(plan: Plan) -> None:
    """Remove the staging folders and the claim of a finished run, the lock last."""
    if not plan.recipe.run.keep_staging:
        for folder in (*_other_staging(plan), plan.staging):
            if folder != _folder(plan):
                files.remove_tree(folder)
    if not plan.recipe.run.keep_staging or _folder(plan) != plan.staging:
        if files.is_local(_folder(plan)):
            for path in files.local_path(_folder(plan)).glob("*"):
                if path.name != _LOCK_FILE:  # while it stands, nobody else begins here
                    files.remove_tree(path)
        files.remove_tree(_folder(plan))


def clean_up_after_kill(plan: Plan) -> None:
    """Finish the clean-up of a run that was killed in it, unless somebody is at work there.

    The output is finished work of this plan: a staging folder without a claim is what is left
    where the claim was removed before the rest.
    """
    if plan.recipe.run.keep_staging or not files.exists(_folder(plan)):
        return
    if is_ours(plan) or not is_claimed(plan):
        with contextlib.suppress(OSError, UserError), contextlib.ExitStack() as stack:
            _lock(stack, plan)
            sweep(plan)
            clean_up(plan)


def sweep(plan: Plan) -> None:
    """Remove the temporary files that a killed process left."""
    for folder in (plan.staging, plan.recipe.output.directory, plan.recipe.dedup.index_out):
        if folder is not None:
            files.sweep(folder)


def _folder(plan: Plan) -> str:
    return files.join(plan.recipe.output.directory, ".staging")


def _work(plan: Plan) -> dict[str, Any]:
    """What makes two runs the same work: recipe, models, and the inputs but for their content.

    What is in the inputs names the staging files; so one that has changed is taken as it now is.
    """
    inputs = [[file.name, file.shard] for file in plan.inputs]
    return {"recipe_digest": plan.digest(), "inputs": files.xxh3_bytes(json.dumps(inputs).encode())}


def _read_claim(plan: Plan) -> dict[str, Any]:
    """The claim that stands; empty when there is none, or none that can be read."""
    try:
        claim = json.loads(files.read_bytes(files.join(_folder(plan), _CLAIM_FILE)))
    except (OSError, ValueError):
        return {}
    return claim if isinstance(claim, dict) else {}


def _other_staging(plan: Plan) -> list[str]:
    """Staging folders of this output that earlier runs used, with another `run.staging`.

    Only folders that bear the name which this output's staging has: nothing else is ours.
    """
    found = _read_claim(plan).get("staging", [])
    own_name = _own_name(plan.recipe)
    return [
        place
        for place in (found if isinstance(found, list) else [])
        if isinstance(place, str)
        and place != plan.staging
        and (place == _folder(plan) or place.rpartition("/")[2] == own_name)
    ]


def _own_name(recipe: MineRecipe) -> str:
    elsewhere = recipe.run.model_copy(update={"staging": "elsewhere"})
    return recipe.model_copy(update={"run": elsewhere}).staging_directory().rpartition("/")[2]


def _lock(stack: contextlib.ExitStack, plan: Plan) -> None:
    """Hold the lock file of the output folder until `stack` ends; local folders only."""
    directory = plan.recipe.output.directory
    if not files.is_local(directory):
        return
    descriptor = lock.take(files.local_path(_folder(plan)) / _LOCK_FILE)
    if descriptor is None:
        raise UserError(
            f"another run is at work in output '{directory}': wait for it, or choose another folder"
        )
    stack.callback(os.close, descriptor)


def _check_folder(folder: str) -> None:
    """Raises OSError where a local `folder` cannot be made or written to; makes nothing."""
    if not files.is_local(folder):
        return
    path = files.local_path(folder)
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _check_index_out(plan: Plan) -> None:
    """Raises UserError when the index that stands is not of the run whose output stands."""
    directory, index_out = plan.recipe.output.directory, plan.recipe.dedup.index_out
    if index_out is None or index_xxh3(index_out) is None:
        return
    ours = None
    if files.exists(files.join(directory, MANIFEST_FILE)):
        ours = read_manifest(directory).index_out
    if index_xxh3(index_out) != ours:
        raise UserError(index_taken(index_out))


def _remove(folder: str, name: str) -> None:
    files.remove(files.join(folder, name))


def _throw_away(plan: Plan) -> None:
    directory = plan.recipe.output.directory
    for name in (MANIFEST_FILE, TIMINGS_FILE, DROPS_FILE):  # the manifest first
        _remove(directory, name)
    for path in parts_in(directory):
        files.remove(path)
    for folder in (*_other_staging(plan), plan.staging):
        if folder not in (plan.staging, _folder(plan)):
            files.remove_tree(folder)
        else:
            for name in ("keys", "pages", "parts"):
                files.remove_tree(files.join(folder, name))
    _remove(_folder(plan), _CLAIM_FILE)


def index_taken(folder: str) -> str:
    """The message for an `index_out` that another run has written."""
    return f"dedup.index_out = '{folder}' holds the index of another run: give a new folder"
