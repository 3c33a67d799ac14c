"""SmolLM2 in JAX, float32: all of the network but attention, which is `fattn.standard`. Reads line by line beside smollm2_npu.py."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from examples.checkpoint import Checkpoint
from fattn import paged, standard
from fattn.types import Batch, Pages, StandardConfig, causal

BLOCK_SIZE = 32  # tokens a page; any size works here


class Layer(NamedTuple):
    """Weights of one layer, matrices as [in, out]."""

    attention_norm: Float[Array, "d"]
    attention: standard.Prepared
    mlp_norm: Float[Array, "d"]
    gate: Float[Array, "d f"]
    up: Float[Array, "d f"]
    down: Float[Array, "f d"]


class Model(NamedTuple):
    """The network's weights; the embedding is the output head too."""

    embedding: Float[Array, "vocabulary d"]
    layers: tuple[Layer, ...]
    norm: Float[Array, "d"]
    norm_epsilon: float
    config: StandardConfig


def load(checkpoint: Checkpoint, *, num_blocks: int) -> tuple[Model, list[Pages]]:
    """The model, and for every layer an empty cache of num_blocks pages of BLOCK_SIZE tokens."""
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
        return jnp.asarray(checkpoint.weights[f"{name}.weight"])

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
    caches = [
        paged.allocate(
            num_blocks, sizes.kv_heads, sizes.head_size, sizes.head_size, block_size=BLOCK_SIZE, layout="hpbd", dtype=jnp.float32
        )
        for _ in layers
    ]
    return model, caches


def step(model: Model, tokens: Int32[np.ndarray, "t"], caches: list[Pages], batch: Batch) -> tuple[Float[Array, "t d"], list[Pages]]:
    """Runs the tokens of one batch through all layers: their last hidden states, and the caches with their keys and values.

    Uses up `caches`: their memory becomes that of the result.
    """
    x = model.embedding[jnp.asarray(tokens)]
    written = []
    for weights, cache in zip(model.layers, caches, strict=True):
        x, cache = _layer(x, weights, cache, batch, config=model.config, norm_epsilon=model.norm_epsilon)
        written.append(cache)
    return x, written


def logits(model: Model, x: Float[Array, "t d"], rows: Int32[np.ndarray, "n"]) -> Float[np.ndarray, "n vocabulary"]:
    """The scores of every next token after the given rows of hidden states."""
    return np.asarray(_head(x, jnp.asarray(rows), model.norm, model.embedding, norm_epsilon=model.norm_epsilon))


# One program for all layers, compiled once a bucket of batch shapes; donating the cache lets it be written in place.
@partial(jax.jit, static_argnames=("config", "norm_epsilon"), donate_argnames="cache")
def _layer(x, weights, cache, batch, *, config, norm_epsilon):
    h = _norm(x, weights.attention_norm, norm_epsilon)
    attended, cache = standard.forward(h, weights.attention, cache, batch, config=config)
    x = x + attended
    h = _norm(x, weights.mlp_norm, norm_epsilon)
    return x + (jax.nn.silu(h @ weights.gate) * (h @ weights.up)) @ weights.down, cache


@partial(jax.jit, static_argnames="norm_epsilon")
def _head(x, rows, norm, embedding, *, norm_epsilon):
    return _norm(x[rows], norm, norm_epsilon) @ embedding.T


def _norm(x, weight, epsilon):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * weight
