"""Held-out losses of a finished checkpoint, as the training loop would find them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AlbertForPreTraining, LlamaForCausalLM

from models.errors import UserError
from pipelines import recipe_file
from training import run_manifest
from training.domains import Corpus, load_corpus
from training.evaluate import domain_loss
from training.evaluate.checkpoint_folder import CheckpointFolder, load_network, load_tokenizer
from training.evaluate.domain_loss import DomainLoss
from training.evaluate.held_out import held_out_losses
from training.evaluate.unigrams import training_unigrams
from training.examples import make_builder
from training.objectives import Objective
from training.recipe import TrainRecipe

_FAMILIES: dict[str, tuple[str, Any]] = {
    "albert": ("albert", AlbertForPreTraining),
    "llama": ("decoder", LlamaForCausalLM),
}


@dataclass(frozen=True)
class HeldOutResult:
    """What one checkpoint was found to lose, and under which settings."""

    folder: CheckpointFolder
    recipe: TrainRecipe
    losses: dict[str, DomainLoss]
    sources: tuple[str, ...]
    """SHA-256 of the mining manifests."""

    def to_json(self) -> dict[str, Any]:
        """For `--json` and result.json."""
        whole = domain_loss.total(self.losses.values())
        means = {term: domain_loss.mean(self.losses.values(), term) for term in whole.terms}
        return {
            "name": self.folder.name,
            "checkpoint": str(self.folder.path),
            "digests": self.folder.digests(),
            "manifests_sha256": list(self.sources),
            "settings": self.recipe.model_dump(
                mode="json", include={"data", "examples", "evaluation"}
            ),
            "domains": {name: loss.to_json() for name, loss in self.losses.items()},
            "without_examples": domain_loss.without_examples(self.losses),
            "total": whole.to_json(),
            "mean_of_domains": {
                term: None if mean is None else mean.to_json() for term, mean in means.items()
            },
        }


def evaluate_held_out(
    folder: CheckpointFolder,
    manifests: Sequence[str],
    overrides: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> HeldOutResult:
    """Losses of the checkpoint on the held-out pages of the mined crawls `manifests`.

    Domains, the held-out share and the making of examples are those of the run's manifest, or of
    the default recipe for a folder that no run made; `overrides` change them, as
    'evaluation.examples=1000'. Raises UserError.
    """
    if not manifests:
        raise UserError("held-out needs the mined crawls: give --data MANIFEST")
    recipe = _recipe(folder, manifests, overrides, progress)
    if recipe.data.held_out == 0:
        raise UserError(
            f"'{folder.path}' held no page out (data.held_out = '0'): there is nothing to evaluate"
        )
    family, kind = _FAMILIES[folder.config.model_type]
    length, longest = recipe.examples.sequence_length, folder.config.max_position_embeddings
    if family == "albert" and length > longest:
        raise UserError(
            f"examples.sequence_length = '{length}' is more than the {longest} positions of "
            f"'{folder.path}': --set examples.sequence_length={longest}"
        )
    tokenizer = load_tokenizer(folder)
    corpus = load_corpus(recipe.data)
    _tell_other_crawls(folder, corpus, progress)
    device = recipe.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_network(folder, kind)
    network.to(device)  # type: ignore[arg-type]
    progress(f"{folder.name}: {len(corpus.names):,} domains, at most "
             f"{recipe.evaluation.examples:,} examples of each")  # fmt: skip
    losses = held_out_losses(
        Objective(network),
        corpus,
        make_builder(recipe, tokenizer),
        data=recipe.data,
        limit=recipe.evaluation.examples,
        microbatch=recipe.batch.microbatch,
        device=device,
        precision=recipe.run.precision,
        tokenizer=tokenizer,
        unigrams=training_unigrams(corpus, tokenizer, data=recipe.data),
    )
    return HeldOutResult(folder, recipe, losses, tuple(source.digest for source in corpus.sources))


def _recipe(
    folder: CheckpointFolder,
    manifests: Sequence[str],
    overrides: Sequence[str],
    progress: Callable[[str], None],
) -> TrainRecipe:
    if folder.config.model_type not in _FAMILIES:
        raise UserError(
            f"checkpoint '{folder.path}' is of the type '{folder.config.model_type}': held-out "
            f"losses are known for {', '.join(_FAMILIES)}"
        )
    if folder.run is not None:
        tree = run_manifest.read(folder.run).recipe
    else:
        progress(f"{folder.name}: made by no run of Gristmill; pages become examples as in the "
                 "default recipe: see --set")  # fmt: skip
        tree = TrainRecipe().model_dump(mode="json")
    tree["model"]["family"] = _FAMILIES[folder.config.model_type][0]
    tree["data"]["manifests"] = list(manifests)
    return recipe_file.validated(TrainRecipe, tree, str(folder.path), overrides)


def _tell_other_crawls(
    folder: CheckpointFolder, corpus: Corpus, progress: Callable[[str], None]
) -> None:
    if folder.run is None:
        return
    known = {source.manifest_sha256 for source in run_manifest.read(folder.run).sources}
    for source in corpus.sources:
        if source.digest not in known:
            progress(f"{folder.name}: was not trained on '{source.path}'")
