"""Models of known shapes with random weights, made in seconds: for benchmarks of the GPU backend. Loads and computes nothing.

All tensors of a model are views of one buffer of random numbers, as large as the largest: the values are meaningless, and
step times do not depend on them. So a model of 16 GB takes 1 GB of the machine's memory.

The lengths of `sharegpt_lengths` are those of the workload `sharegpt` of the other benchmarks (`workloads.py`), counted with
the tokenizer of SmolLM2-135M; they are kept in sharegpt_lengths.json, so that neither traces nor a tokenizer are needed:

    python benchmarks/gpu_shapes.py --traces FOLDER       # writes that file
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.models.formats import BLOCKS, WeightFormat, stored_bytes
from penstock.models.weights import BlockScales, LoadedModel, WeightTensor
from penstock.types.model_spec import ModelSpec, spec_of_equal_layers

LENGTHS_FILE = Path(__file__).with_name("sharegpt_lengths.json")
NUM_LENGTHS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a decoder such as Llama's."""

    like: str
    """Name of the model that has it."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool
    has_qkv_bias: bool = False
    rope_theta: float = 500_000.0
    max_model_len: int = 8192

    def spec(self) -> ModelSpec:
        inv_freq = self.rope_theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        return spec_of_equal_layers(
            architecture="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            norm_eps=1e-5,
            rope_inv_freq=tuple(inv_freq.tolist()),
            max_model_len=self.max_model_len,
            tie_word_embeddings=self.is_tied,
            has_qkv_bias=self.has_qkv_bias,
        )

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(name, rows, columns), by canonical name."""
        yield "embed", self.vocab_size, self.hidden_size
        if not self.is_tied:
            yield "output", self.vocab_size, self.hidden_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for layer in range(self.num_layers):
            for name, rows, cols in (
                ("q", queries, self.hidden_size),
                ("k", keys, self.hidden_size),
                ("v", keys, self.hidden_size),
                ("o", self.hidden_size, queries),
                ("gate", self.intermediate_size, self.hidden_size),
                ("up", self.intermediate_size, self.hidden_size),
                ("down", self.hidden_size, self.intermediate_size),
            ):
                yield f"layers.{layer}.{name}", rows, cols

    def vectors(self) -> Iterator[tuple[str, int, float]]:
        """(name, length, value of all entries)."""
        yield "norm", self.hidden_size, 1.0
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for layer in range(self.num_layers):
            yield f"layers.{layer}.attn_norm", self.hidden_size, 1.0
            yield f"layers.{layer}.mlp_norm", self.hidden_size, 1.0
            if self.has_qkv_bias:
                yield from (
                    (f"layers.{layer}.{name}_bias", size, 0.0) for name, size in zip("qkv", (queries, keys, keys), strict=True)
                )

    @property
    def num_weights(self) -> int:
        """Weights that multiply a token: all matrices except an embedding table, which is only looked up."""
        total = sum(rows * cols for _, rows, cols in self.matrices())
        return total if self.is_tied else total - self.vocab_size * self.hidden_size


SHAPES = {
    "135m": Shape(
        like="SmolLM2-135M",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        is_tied=True,
        rope_theta=100_000.0,
    ),
    "1.5b": Shape(
        like="Qwen2.5-1.5B",
        num_layers=28,
        hidden_size=1536,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        intermediate_size=8960,
        vocab_size=151936,
        is_tied=True,
        has_qkv_bias=True,
        rope_theta=1_000_000.0,
    ),
    "8b": Shape(
        like="Llama-3.1-8B",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        is_tied=False,
    ),
    "tiny": Shape(
        like="nothing; for the benchmarks' own tests",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=256,
        is_tied=True,
        max_model_len=256,
    ),
}


def random_model(shape: Shape, fmt: WeightFormat = WeightFormat.BF16, seed: int = 0) -> LoadedModel:
    """A model whose matrices are of one format, BF16, F8_E4M3, Q8_0 or Q4_0, as far as `format_of` goes."""
    rng = np.random.default_rng(seed)
    buffers = {}
    for kind in {format_of(name, fmt) for name, _, _ in shape.matrices()}:
        sizes = [stored_bytes(kind, rows, cols) for name, rows, cols in shape.matrices() if format_of(name, fmt) is kind]
        buffers[kind] = _random_bytes(kind, max(sizes), rng)
    weights = {name: _matrix(name, rows, cols, format_of(name, fmt), buffers) for name, rows, cols in shape.matrices()}
    for name, length, value in shape.vectors():
        weights[name] = WeightTensor(name, 1, length, WeightFormat.F32, np.full((1, length), value, np.float32))
    return LoadedModel(
        name=shape.like,
        spec=shape.spec(),
        weights=weights,
        tokenizer_source=Path(),
        bos_token_id=None,
        eos_token_ids=(),
        path=Path(),
    )


def format_of(name: str, fmt: WeightFormat) -> WeightFormat:
    """The format of a matrix: in models in fp8 embeddings and logits are in bf16."""
    return WeightFormat.BF16 if fmt is WeightFormat.F8_E4M3 and name in ("embed", "output") else fmt


def _matrix(name: str, rows: int, cols: int, fmt: WeightFormat, buffers: Mapping[WeightFormat, np.ndarray]) -> WeightTensor:
    scales = None
    if fmt is WeightFormat.F8_E4M3:
        scales = BlockScales(np.full((rows, 1), 0.02 / 104, np.float32), 1, cols)  # over the spread of the numbers
    return WeightTensor(name, rows, cols, fmt, _view(buffers[fmt], fmt, rows, cols), scales)


def _random_bytes(fmt: WeightFormat, num_bytes: int, rng: np.random.Generator) -> np.ndarray:
    """Weights of about 0.02, as models have them. uint8 [num_bytes]"""
    if fmt is WeightFormat.BF16:
        bits = np.frombuffer(rng.bytes(num_bytes), np.uint16).copy()
        bits &= 0x807F  # sign and mantissa
        bits |= 121 << 7  # times 2 ** -6
        return bits.view(np.uint8)
    if fmt is WeightFormat.F8_E4M3:
        return np.frombuffer(rng.bytes(num_bytes), np.uint8) & np.uint8(0xFE)  # none is NaN
    if fmt not in (WeightFormat.Q8_0, WeightFormat.Q4_0):
        raise ValueError(f"no random weights in {fmt}")
    block_bytes = BLOCKS[fmt][1]
    blocks = np.frombuffer(rng.bytes(num_bytes), np.uint8).reshape(-1, block_bytes).copy()
    scale = np.float16(0.02 / (73 if fmt is WeightFormat.Q8_0 else 4.6))  # over the spread of the integers
    blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(-1)


def _view(buffer: np.ndarray, fmt: WeightFormat, rows: int, cols: int) -> np.ndarray:
    data = buffer[: stored_bytes(fmt, rows, cols)]
    return data.view(np.uint16).reshape(rows, cols) if fmt is WeightFormat.BF16 else data.reshape(rows, -1)


def sharegpt_lengths(count: int) -> list[tuple[int, int]]:
    """(prompt, reply) in tokens, of `count` requests; from the beginning again after the last."""
    lengths = json.loads(LENGTHS_FILE.read_text())["lengths"]
    return [tuple(lengths[idx % len(lengths)]) for idx in range(count)]


def prompts(lengths: Sequence[tuple[int, int]], vocab_size: int) -> list[tuple[int, ...]]:
    """Tokens of prompts of which no two begin alike."""
    return [
        tuple((token * 7919 + idx * 104729 + token * token * 31) % (vocab_size - 10) + 10 for token in range(num_prompt))
        for idx, (num_prompt, _) in enumerate(lengths)
    ]


def _write_lengths(traces: Path) -> None:
    from workloads import Source, read_jobs, read_tokenizer

    from penstock.models.cache import default_cache_dir
    from penstock.models.catalog import DEFAULT_MODEL, resolve

    source = Source(traces, read_tokenizer(resolve(DEFAULT_MODEL, default_cache_dir()).path))
    jobs = read_jobs("sharegpt", source, NUM_LENGTHS)
    pairs = ",\n".join(json.dumps([job.num_prompt_tokens, job.num_output_tokens]) for job in jobs)
    made_by = "python benchmarks/gpu_shapes.py; the tokenizer of SmolLM2-135M"
    LENGTHS_FILE.write_text(f'{{"made_by": "{made_by}", "lengths": [\n{pairs}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    _write_lengths(parser.parse_args().traces)


if __name__ == "__main__":
    main()
