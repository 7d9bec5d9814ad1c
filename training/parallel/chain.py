"""A network as a chain of units, which a pipeline can cut between any two.

Each unit takes the hidden states of the one before it. What else it reads (labels, positions, a
mask) comes from the batch, which every rank of a pipeline has: only hidden states travel.
`objective_chain` cuts our own networks, `module_chain` any module that is a chain of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AlbertForPreTraining, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from models.errors import UserError
from training.batches import Batch
from training.objectives import Losses, Objective, albert_losses, decoder_losses, document_mask

Side = dict[str, Any]
"""What the units of a stage read beside the hidden states, made of a batch once a stage."""


@dataclass(frozen=True)
class Unit:
    """One link. `run(hidden, side)` gives the next hidden states.

    The first unit's `hidden` is the batch's tensor `Chain.input`; the last one gives what the
    loss is made of.
    """

    name: str
    modules: tuple[tuple[str, nn.Module], ...]
    """The modules whose parameters it uses, each with its name in the root."""
    run: Callable[[Tensor, Side], Tensor]


@dataclass(frozen=True)
class Chain:
    """A network, cut as fine as it can be. It keeps nothing of the root but its modules."""

    units: tuple[Unit, ...]
    input: str
    """Name of the batch's tensor that the first unit takes."""
    side: Callable[[Batch], Side]
    common: tuple[tuple[str, nn.Module], ...] = ()
    """Modules without parameters that `side` needs, on every stage."""

    def parameter_names(self) -> dict[int, str]:
        """The name in the root of each parameter, by its id: of shared ones the first."""
        found: dict[int, str] = {}
        for unit in self.units:
            for path, module in unit.modules:
                for name, parameter in module.named_parameters():
                    found.setdefault(id(parameter), f"{path}.{name}")
        return found

    def holders(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the units that use each parameter, by its first name."""
        names = self.parameter_names()
        found: dict[str, dict[int, None]] = {}
        for number, unit in enumerate(self.units):
            for _, module in unit.modules:
                for parameter in module.parameters():
                    found.setdefault(names[id(parameter)], {})[number] = None
        return {name: tuple(numbers) for name, numbers in found.items()}


def objective_chain(objective: Objective) -> Chain:
    """The units of a recipe's network; the last one gives `packed` losses.

    Names are those in `objective`, as `network.model.layers.3`. ALBERT's one block is used by the
    unit of each layer. Raises UserError where a parameter belongs to no unit.
    """
    network, most = objective.network, objective.max_logit_rows
    if isinstance(network, AlbertForPreTraining):
        chain = _albert_chain(network, most)
    else:
        chain = _decoder_chain(network, most)
    return _covering(
        objective,
        chain,
        f"units of a '{type(network).__name__}': take another run.strategy than 'pipeline'",
    )


def module_chain(root: nn.Module, blocks: Sequence[str] | None = None) -> Chain:
    """The units of a module that calls some of its submodules one after the other.

    blocks: their names in `root`, in the order of the calls; none: all children of an
    nn.Sequential. Each takes one tensor and gives one; the first takes the batch's "input".
    Raises UserError where a parameter of `root` belongs to no block: it would not be trained.
    """
    if blocks is None:
        if not isinstance(root, nn.Sequential):
            raise UserError(
                f"'{type(root).__name__}' is no nn.Sequential: name its blocks in the order in "
                "which it calls them"
            )
        blocks = list(root._modules)  # named_children() drops a module that comes twice
    units = []
    for name in blocks:
        block = root.get_submodule(name)
        units.append(Unit(name, ((name, block),), _plain_call(block)))
    chain = Chain(tuple(units), "input", dict)
    return _covering(root, chain, f"blocks {', '.join(blocks)}: add the block that uses it")


def _covering(root: nn.Module, chain: Chain, what: str) -> Chain:
    """`chain`; UserError where a parameter of `root` belongs to none of its units: it would not be
    trained. what: their name, and the repair."""
    known = chain.parameter_names()
    for name, parameter in root.named_parameters():
        if id(parameter) not in known:
            raise UserError(f"parameter '{name}' belongs to none of the {what}")
    return chain


def _plain_call(block: nn.Module) -> Callable[[Tensor, Side], Tensor]:
    def run(hidden: Tensor, _: Side) -> Tensor:
        found: Tensor = block(hidden)
        return found

    return run


def packed(losses: Losses) -> Tensor:
    """Losses as one float32 tensor, (examples, 3 x terms): sums, counts, correct."""
    return torch.cat([part.float() for part in losses[:3]]).t().contiguous()


def unpacked(values: Tensor) -> Losses:
    """What `packed` was made of, without `tokens`."""
    sums, counts, correct = values.t().chunk(3)
    return Losses(sums, counts.double(), correct.double())


def _decoder_chain(network: PreTrainedModel, max_logit_rows: int) -> Chain:
    model, head = network.model, network.lm_head
    rotary, norm, embedding = model.rotary_emb, model.norm, model.embed_tokens

    def side(batch: Batch) -> Side:
        labels = batch["labels"]
        positions = batch.get("position_ids")
        mask = None if positions is None else document_mask(positions)
        if positions is None:
            positions = torch.arange(labels.shape[1], device=labels.device)[None]
        # Only the device and the kind of numbers of the first argument count.
        like = torch.empty((), device=labels.device)
        return {
            "labels": labels,
            "positions": positions,
            "mask": mask,
            "rotary": rotary(like, position_ids=positions),
        }

    def block(layer: nn.Module) -> Callable[[Tensor, Side], Tensor]:
        def run(hidden: Tensor, side: Side) -> Tensor:
            found: Tensor = layer(
                hidden,
                attention_mask=side["mask"],
                position_embeddings=side["rotary"],
                position_ids=side["positions"],
                use_cache=False,
            )
            return found

        return run

    def losses(hidden: Tensor, side: Side) -> Tensor:
        return packed(decoder_losses(head, norm(hidden), side, max_logit_rows))

    def embed(ids: Tensor, _: Side) -> Tensor:
        found: Tensor = embedding(ids)
        return found

    units = [Unit("embedding", (("network.model.embed_tokens", embedding),), embed)]
    for number, layer in enumerate(model.layers):
        units.append(
            Unit(f"layer {number}", ((f"network.model.layers.{number}", layer),), block(layer))
        )
    held = (("network.model.norm", norm), ("network.lm_head", head))
    units.append(Unit("head", held, losses))
    return Chain(tuple(units), "input_ids", side, (("network.model.rotary_emb", rotary),))


def _albert_chain(network: AlbertForPreTraining, max_logit_rows: int) -> Chain:
    albert, predictions, order_head = network.albert, network.predictions, network.sop_classifier
    config, encoder, pooler = network.config, albert.encoder, albert.pooler
    embeddings, activation = albert.embeddings, albert.pooler_activation
    mapping, groups = encoder.embedding_hidden_mapping_in, encoder.albert_layer_groups

    def side(batch: Batch) -> Side:
        ids = batch["input_ids"]
        mask = create_bidirectional_mask(
            config=config,
            inputs_embeds=torch.empty((*ids.shape, 1), device=ids.device),
            attention_mask=batch["attention_mask"],
        )
        return {**batch, "mask": mask}

    def embed(ids: Tensor, side: Side) -> Tensor:
        found: Tensor = mapping(embeddings(ids, token_type_ids=side["token_type_ids"]))
        return found

    def block(group: nn.Module) -> Callable[[Tensor, Side], Tensor]:
        def run(hidden: Tensor, side: Side) -> Tensor:
            found: Tensor = group(hidden, side["mask"])
            return found

        return run

    def losses(hidden: Tensor, side: Side) -> Tensor:
        pooled = activation(pooler(hidden[:, 0]))
        return packed(
            albert_losses(
                predictions, order_head, hidden, pooled, batch=side, max_logit_rows=max_logit_rows
            )
        )

    prefix = "network.albert"
    units = [
        Unit(
            "embedding",
            (
                (f"{prefix}.embeddings", embeddings),
                (f"{prefix}.encoder.embedding_hidden_mapping_in", mapping),
            ),
            embed,
        )
    ]
    layers = config.num_hidden_layers
    for number in range(layers):
        index = number * config.num_hidden_groups // layers
        name, group = f"{prefix}.encoder.albert_layer_groups.{index}", groups[index]
        units.append(Unit(f"layer {number}", ((name, group),), block(group)))
    held = (
        (f"{prefix}.pooler", pooler),
        ("network.predictions", predictions),
        ("network.sop_classifier", order_head),
    )
    units.append(Unit("head", held, losses))
    return Chain(tuple(units), "input_ids", side)


def run_chain(chain: Chain, batch: Mapping[str, Tensor]) -> Tensor:
    """What the last unit gives, all units in this process."""
    side = chain.side(dict(batch))
    hidden = batch[chain.input]
    for unit in chain.units:
        hidden = unit.run(hidden, side)
    return hidden
