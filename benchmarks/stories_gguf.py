"""Writes a model of llama2.c as a GGUF file: a small model with Llama 2's vocabulary, to draft for larger ones.

    python benchmarks/stories_gguf.py stories15M.bin stories_tokenizer.bin stories15M.gguf

The format is that of llama2.c's first version (https://github.com/karpathy/llama2.c/blob/master/export.py, `legacy_export`).
Matrices become Q8_0.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray

HEADER = struct.Struct("<7i")
NUM_SPECIAL, NUM_BYTES = 3, 256
"""The first tokens of Llama 2: unknown, begin and end, then the bytes."""


def read_tokens(path: Path, num_tokens: int) -> tuple[list[str], list[float]]:
    data, at = path.read_bytes(), 4
    tokens: list[str] = []
    scores: list[float] = []
    for _ in range(num_tokens):
        score, num_bytes = struct.unpack_from("<fi", data, at)
        at += 8 + num_bytes
        tokens.append(data[at - num_bytes : at].decode().replace(" ", "\u2581"))
        scores.append(score)
    tokens[: NUM_SPECIAL + NUM_BYTES] = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(NUM_BYTES)]]
    return tokens, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "tokenizer", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args()
    dim, hidden, num_layers, num_heads, num_kv_heads, num_tokens, longest = HEADER.unpack_from(args.model.read_bytes())
    assert num_tokens > 0, "the output matrix is the embedding"
    weights, at = np.fromfile(args.model, "<f4", offset=HEADER.size), 0

    def take(*shape: int) -> NDArray[np.float32]:
        nonlocal at
        at += (size := int(np.prod(shape)))
        return weights[at - size : at].reshape(shape)

    kv_dim = dim // num_heads * num_kv_heads
    tensors = {"token_embd": take(num_tokens, dim)}
    for name, shape in {
        "attn_norm": (dim,),
        "attn_q": (dim, dim),
        "attn_k": (kv_dim, dim),
        "attn_v": (kv_dim, dim),
        "attn_output": (dim, dim),
        "ffn_norm": (dim,),
        "ffn_gate": (hidden, dim),
        "ffn_down": (dim, hidden),
        "ffn_up": (hidden, dim),
    }.items():
        tensors |= {f"blk.{layer}.{name}": one for layer, one in enumerate(take(num_layers, *shape))}
    tensors["output_norm"] = take(dim)
    writer = GGUFWriter(args.out, "llama")
    writer.add_name(args.model.stem)
    writer.add_context_length(longest)
    writer.add_embedding_length(dim)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_dimension_count(dim // num_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, scores = read_tokens(args.tokenizer, num_tokens)
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * NUM_BYTES]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([*types, *[TokenType.NORMAL] * (num_tokens - len(types))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(f"{name}.weight", tensor)
        else:
            writer.add_tensor(
                f"{name}.weight", quantize(tensor, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
