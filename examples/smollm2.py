"""A real language model on functional attention: `python -m examples.smollm2 --layer fattn|npu --prompt TEXT`.

SmolLM2-135M-Instruct writes greedily, its keys and values in a paged cache. What an engine does around attention is here, small: a
prompt is run in chunks, then token by token, and a prompt that begins like an earlier one reuses its pages. Every one of these steps
is a `Batch`, and every layer runs it by the same `standard.forward`.
"""

from __future__ import annotations

import importlib
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from jaxtyping import Float
from tokenizers.decoders import DecodeStream

from examples import checkpoint
from examples.prefixes import Prefixes
from fattn.plan import batch as plan

CHUNK = 64  # tokens of a prompt in one step: a long prompt must not keep others waiting
NULL_BLOCK = 0  # kept free: padding of an NPU's batch is written here
CONTEXT = 2048  # tokens that the caches have room for


class LayerName(StrEnum):
    """Which package computes attention: the definitions in JAX, or torch_npu."""

    fattn = "fattn"
    npu = "npu"


@dataclass
class Report:
    """What one prompt took: counts are tokens, and seconds include compiling for new shapes."""

    hit: int = 0
    chunks: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    written: int = 0
    decode_seconds: float = 0.0

    def add(self, tokens: int, seconds: float, *, of_prompt: bool):
        """Counts one step."""
        if of_prompt:
            self.chunks.append(tokens)
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds

    def __str__(self):
        prefill, decode = sum(self.chunks), self.written - 1  # the first token comes from the prompt's last chunk
        rate = f"{decode / self.decode_seconds:.1f} tokens/s" if decode > 0 else "no step"
        return (
            f"prefix hits {self.hit} tokens; prefill {prefill} tokens in {len(self.chunks)} chunks {self.chunks}, "
            f"{prefill / self.prefill_seconds:.1f} tokens/s; decode {max(decode, 0)} tokens, {rate}"
        )


@dataclass
class Session:
    """A model, its caches, and which of their blocks hold what. `network` is examples.smollm2_fattn or examples.smollm2_npu."""

    network: ModuleType
    model: Any
    caches: list
    prefixes: Prefixes
    num_blocks: int

    def step(self, tokens: list[int], start: int, blocks: list[int]):
        """Runs `tokens` at positions start, start + 1, ... of the sequence in `blocks`: hidden states [t d], padding rows after them."""
        batch = plan.build(
            [len(tokens)],
            [start + len(tokens)],
            [blocks],
            block_size=self.network.BLOCK_SIZE,
            num_blocks=self.num_blocks,
            null_blocks=(NULL_BLOCK,),
        )
        batch = plan.bucket(batch, null_blocks=(NULL_BLOCK,))  # few shapes, so few compilations
        padded = np.zeros(batch.slot_mapping.shape, np.int32)
        padded[: len(tokens)] = tokens
        x, self.caches = self.network.step(self.model, padded, self.caches, batch)
        return x

    def generate(
        self, ids: list[int], *, tokens: int, report: Report, banned: tuple[int, ...] = (), stop: int | None = None
    ) -> Iterator[int]:
        """The greedy continuation of `ids`, at most `tokens` long, up to `stop`; `banned` tokens are never chosen. Fills in `report`."""
        sequence, (blocks, report.hit) = list(ids), self.prefixes.take(ids, room=tokens)
        done = report.hit  # so many tokens have their keys and values in the cache
        try:
            while report.written < tokens:
                began = time.perf_counter()
                chunk = sequence[done : done + CHUNK]
                x = self.step(chunk, done, blocks)
                done += len(chunk)
                token = self._best(x, len(chunk) - 1, banned) if done == len(sequence) else None
                report.add(len(chunk), time.perf_counter() - began, of_prompt=done <= len(ids))
                if token is None:
                    continue
                report.written += 1
                if token == stop:
                    break
                sequence.append(token)
                yield token
        finally:
            self.prefixes.give(sequence[:done], blocks)

    def logits(self, ids: list[int], *, chunk: int = CHUNK) -> Float[np.ndarray, "t vocabulary"]:
        """The scores of every next token after every one of `ids`, all of them computed anew in chunks. Forgets every page."""
        self.prefixes.forget()
        blocks, rows = self.prefixes.take(ids, room=0).blocks, []
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            x = self.step(part, start, blocks)
            rows.append(self.network.logits(self.model, x, np.arange(len(part), dtype=np.int32)))
        self.prefixes.give(ids, blocks)
        return np.concatenate(rows)

    def _best(self, x, row, banned):
        scores = self.network.logits(self.model, x, np.asarray([row], np.int32))[0]
        scores = np.where(np.isin(np.arange(scores.size), banned), -np.inf, scores)
        return int(scores.argmax())


def begin(layer: str, loaded: checkpoint.Checkpoint) -> Session:
    """A session with empty caches, its attention computed by the package of that name: fattn or npu."""
    network = importlib.import_module(f"examples.smollm2_{layer}")
    num_blocks = 1 + CONTEXT // network.BLOCK_SIZE
    model, caches = network.load(loaded, num_blocks=num_blocks)
    prefixes = Prefixes(range(NULL_BLOCK + 1, num_blocks), block_size=network.BLOCK_SIZE)
    return Session(network, model, caches, prefixes, num_blocks)


def main(
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    layer: Annotated[LayerName, typer.Option(help="Which package computes attention.")] = LayerName.fattn,
    tokens: Annotated[int, typer.Option(min=1, help="The longest continuation, in tokens.")] = 32,
    then: Annotated[str, typer.Option(help="A second prompt, put after the first one and its continuation.")] = " In other words,",
    cold: Annotated[bool, typer.Option("--cold", help="Forget all pages before the second prompt: nothing is reused.")] = False,
):
    """SmolLM2-135M-Instruct continues a prompt, then a second one that begins with all of the first."""
    if not prompt:
        raise typer.BadParameter("the prompt is empty; at least one character would work")
    began = psutil.Process().create_time()
    loaded = checkpoint.load()
    session = begin(layer.value, loaded)
    print(f"{layer.value}: imported and loaded in {time.time() - began:.1f} s")
    ids: list[int] = []
    first = None
    for number, text in enumerate((prompt, then)):
        if cold and number:
            session.prefixes.forget()
        ids += loaded.tokenizer.encode(text).ids
        report, written, stream = Report(), [], DecodeStream(skip_special_tokens=False)
        print(f"\n{text}", end="", flush=True)
        for token in session.generate(ids, tokens=tokens, report=report, stop=loaded.architecture.end_of_text):
            written.append(token)
            print(stream.step(loaded.tokenizer, token) or "", end="", flush=True)  # None: a character's bytes are not complete
            first = first or time.time() - began
        ids += written
        print(f"\n[{report}]")
    if layer is LayerName.npu:
        from examples import eager  # imports torch, which the other layer does without

        print(eager.distances(session, ids))
    waited = "no token" if first is None else f"first token {first:.1f} s after the program's start"
    print(f"\n{waited}; peak memory {_peak_memory() / 2**30:.2f} GiB; rates include compiling")


def _peak_memory() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    program.command()(main)
    program()
