"""Work of a training step and the share of a device's peak that it makes use of (MFU).

Counted as in PaLM (Chowdhery et al. 2022, appendix B): 6 FLOPs for each weight of a matrix that a
token passes, and 12 x layers x channels x length for attention over the whole square; work that
recomputation adds, norms and the optimiser do not count. A causal or document mask saves work
that the whole square still counts.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from training.recipe import TrainRecipe


class Peak(NamedTuple):
    """Peak of one device, FLOP/s."""

    name: str
    bf16: float
    fp32: float


def flops_per_token(config: PretrainedConfig, length: int, labelled: float) -> float:
    """FLOPs of a forward and a backward pass for each token of an example of `length` tokens.

    `labelled`: share of the tokens that need logits; the others do not pass the head.
    """
    hidden, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
    feed_forward = config.intermediate_size
    if config.model_type == "albert":
        narrow = config.embedding_size
        block = 4 * hidden * hidden + 2 * hidden * feed_forward
        once = narrow * hidden  # embedding to channels
        head = hidden * narrow + narrow * vocabulary
    else:
        shared = config.num_key_value_heads / config.num_attention_heads
        block = (2 + 2 * shared) * hidden * hidden + 3 * hidden * feed_forward
        once = 0
        head = hidden * vocabulary
    weights = layers * block + once + labelled * head
    return float(6 * weights + 12 * layers * hidden * length)


def labelled_share(recipe: TrainRecipe) -> float:
    """Share of the tokens whose logits are computed."""
    return recipe.examples.masked if recipe.model.family == "albert" else 1.0


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak of a CUDA device in FLOP/s for 'bf16' or 'fp32'; None where it is not known."""
    if device.type != "cuda":
        return None
    import torch  # noqa: PLC0415

    return known_peak(torch.cuda.get_device_name(device), precision)


def known_peak(device_name: str, precision: str) -> float | None:
    """Peak in FLOP/s of the device that `device_name` names; None where it is not known."""
    for peak in peaks():
        if peak.name in device_name:
            return peak.bf16 if precision == "bf16" else peak.fp32
    return None


def peaks() -> list[Peak]:
    """The table of known devices, in the order in which names are tried."""
    text = resources.files("training").joinpath("peak_flops.tsv").read_text(encoding="utf-8")
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, bf16, fp32 = line.split("\t")
            found.append(Peak(name=name, bf16=float(bf16) * 1e12, fp32=float(fp32) * 1e12))
    return found
