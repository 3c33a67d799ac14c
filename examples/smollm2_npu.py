"""SmolLM2 in torch: attention and its cache in float16 on `npu.standard`, the rest in float32. Reads line by line beside smollm2_fattn.py.

Where no NPU is visible, the operators of torch_npu are emulated on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.nn.functional import silu

import npu
from examples.checkpoint import Checkpoint
from fattn.types import Batch, Pages, StandardConfig, causal
from npu import emulator, paged, standard

BLOCK_SIZE = 128  # tokens a page: the operator takes multiples of 128 for several queries at head size 64


class Layer(NamedTuple):
    """Weights of one layer, matrices as [in, out]."""

    attention_norm: Float[Tensor, "d"]
    attention: standard.Prepared
    mlp_norm: Float[Tensor, "d"]
    gate: Float[Tensor, "d f"]
    up: Float[Tensor, "d f"]
    down: Float[Tensor, "f d"]


class Model(NamedTuple):
    """The network's weights; the embedding is the output head too."""

    embedding: Float[Tensor, "vocabulary d"]
    layers: tuple[Layer, ...]
    norm: Float[Tensor, "d"]
    norm_epsilon: float
    config: StandardConfig


def load(checkpoint: Checkpoint, *, num_blocks: int) -> tuple[Model, list[Pages]]:
    """The model, and for every layer an empty cache of num_blocks pages of BLOCK_SIZE tokens."""
    emulator.install()
    torch.set_num_threads(1)  # on two cores, two threads write six times slower than one
    device = torch.device("npu" if torch.npu.is_available() else "cpu")
    sizes = checkpoint.architecture
    config = StandardConfig(
        hidden_size=sizes.hidden_size,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        scale=sizes.head_size**-0.5,
        mask=causal(),
        rotary="half",
        rotary_theta=sizes.rotary_theta,
    )

    def weight(name):
        return torch.from_numpy(checkpoint.weights[f"{name}.weight"]).to(device)

    def layer(i):
        attention = standard.Weights(*(weight(f"blk.{i}.attn_{name}") for name in ("q", "k", "v", "output")))
        return Layer(
            attention_norm=weight(f"blk.{i}.attn_norm"),
            attention=standard.prepare(attention, config=config),
            mlp_norm=weight(f"blk.{i}.ffn_norm"),
            gate=weight(f"blk.{i}.ffn_gate"),
            up=weight(f"blk.{i}.ffn_up"),
            down=weight(f"blk.{i}.ffn_down"),
        )

    layers = tuple(layer(i) for i in range(sizes.layers))
    model = Model(weight("token_embd"), layers, weight("output_norm"), sizes.norm_epsilon, config)
    with device:  # where allocate puts its zeros
        caches = [
            paged.allocate(
                num_blocks, sizes.kv_heads, sizes.head_size, sizes.head_size, block_size=BLOCK_SIZE, layout="pbhd", dtype=torch.float16
            )
            for _ in layers
        ]
    return model, caches


def step(
    model: Model, tokens: Int32[np.ndarray, "t"], caches: list[Pages], batch: Batch, *, attend=paged.attend
) -> tuple[Float[Tensor, "t d"], list[Pages]]:
    """Runs the tokens of one batch through all layers: their last hidden states, and the caches with their keys and values.

    The caches are written in place. `attend` may be any function with the signature of `npu.paged.attend`.
    """
    device = model.embedding.device
    batch = npu.place(batch, device, model.config.mask)
    x = model.embedding[torch.from_numpy(tokens).to(device)]
    written = []
    for weights, cache in zip(model.layers, caches, strict=True):
        h = norm(x, weights.attention_norm, model.norm_epsilon)
        attended, cache = standard.forward(h, weights.attention, cache, batch, config=model.config, attend=attend)
        x = mlp(x + attended, weights, model.norm_epsilon)
        written.append(cache)
    return x, written


def logits(model: Model, x: Float[Tensor, "t d"], rows: Int32[np.ndarray, "n"]) -> Float[np.ndarray, "n vocabulary"]:
    """The scores of every next token after the given rows of hidden states."""
    x = x[torch.from_numpy(rows).to(x.device)]
    return (norm(x, model.norm, model.norm_epsilon) @ model.embedding.T).cpu().numpy()


def mlp(x: Float[Tensor, "t d"], weights: Layer, norm_epsilon: float) -> Float[Tensor, "t d"]:
    """x and the gated network of its normalised rows."""
    h = norm(x, weights.mlp_norm, norm_epsilon)
    return x + (silu(h @ weights.gate) * (h @ weights.up)) @ weights.down


def norm(x: Float[Tensor, "t d"], weight: Float[Tensor, "d"], epsilon: float) -> Float[Tensor, "t d"]:
    """Rows of x with mean square 1, times the weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight
