"""Owns the yardstick: transformers' own models over the exact values of a GGUF file's weights, for the parity scripts.

Called by `make_golden.py` and `full.py`, which have torch; never imported by tests that run without it. It shares no
code with the package under test: the files of Llama and Qwen 2 are read through the `gguf` package, and their byte-level
tokenizers are built here again. Other files, and other tokenizers, are read by transformers itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight", "output": "lm_head.weight"}
_CONTROL, _USER_DEFINED = 3, 4
"""Token types of the GGUF specification."""


_MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
_QWEN2_PARTS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""From the tokenizer.json of Qwen2.5."""


class GgufReference:
    """A GGUF file as transformers sees it. Raises ValueError for an architecture whose files nobody reads here."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = GGUFReader(path)
        self.architecture = self._field("general.architecture")
        known = (*_MODELS, *GGUF_SUPPORTED_ARCHITECTURES)
        if self.architecture not in known:
            raise ValueError(f"{path}: the reference is written for {', '.join(known)}, not {self.architecture!r}")

    def config(self) -> LlamaConfig | Qwen2Config:
        num_heads = self._number("attention.head_count")
        hidden_size = self._number("embedding_length")
        return _MODELS[self.architecture][0](
            vocab_size=len(self._reader.fields["tokenizer.ggml.tokens"].data),
            hidden_size=hidden_size,
            intermediate_size=self._number("feed_forward_length"),
            num_hidden_layers=self._number("block_count"),
            num_attention_heads=num_heads,
            num_key_value_heads=self._number("attention.head_count_kv"),
            head_dim=self._number("rope.dimension_count", hidden_size // num_heads),
            max_position_embeddings=self._number("context_length"),
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self._number("rope.freq_base")},
            tie_word_embeddings=not any(t.name == "output.weight" for t in self._reader.tensors),
            bos_token_id=self._field("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._field("tokenizer.ggml.eos_token_id"),
            attn_implementation="sdpa",
        )

    def model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The model in eval mode. In bfloat16 every weight is the nearest bfloat16 to its exact value."""
        if self.architecture not in _MODELS:
            read = AutoModelForCausalLM.from_pretrained(self._path.parent, gguf_file=self._path.name, dtype=torch.float32)
            return read.eval().to(dtype)
        config = self.config()
        model = _MODELS[self.architecture][1](config).eval()
        missing = {name for name, _ in model.named_parameters()}  # a tied output has no name of its own
        for name, values in self.state(config):  # one at a time: a second copy of all may not fit
            with torch.no_grad():
                model.get_parameter(name).copy_(values)
            missing.remove(name)
        if missing:
            raise ValueError(f"the file lacks {sorted(missing)}")
        return model.to(dtype)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file."""
        kind = tuple(
            self._field(f"tokenizer.ggml.{key}") if f"tokenizer.ggml.{key}" in self._reader.fields else ""
            for key in ("model", "pre")
        )
        if kind not in {("gpt2", "smollm"), ("gpt2", "qwen2")}:
            read = AutoTokenizer.from_pretrained(self._path.parent, gguf_file=self._path.name)
            return read.backend_tokenizer
        tokens = self._field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        if kind[1] == "qwen2":
            cut = pre_tokenizers.Split(Regex(_QWEN2_PARTS), "isolated")
            tokenizer.normalizer = normalizers.NFC()
        else:
            cut = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind[1] != "qwen2")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        types = self._field("tokenizer.ggml.token_type")
        added = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _CONTROL]
        tokenizer.add_special_tokens(added)
        tokenizer.add_tokens(
            [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
        )
        return tokenizer

    @property
    def chat_template(self) -> str:
        """The file's, or one that puts messages one below the other, for a model that was not tuned for chats."""
        if "tokenizer.chat_template" not in self._reader.fields:
            return "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
        return str(self._field("tokenizer.chat_template"))

    @property
    def eos_token(self) -> str:
        return str(self._field("tokenizer.ggml.tokens")[self._field("tokenizer.ggml.eos_token_id")])

    def state(self, config: LlamaConfig | Qwen2Config) -> Iterator[tuple[str, torch.Tensor]]:
        """The exact values of every tensor in float32, one after the other, by transformers' names and in its layout."""
        num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(tuple(reversed(tensor.shape)))
            stem, _, kind = tensor.name.rpartition(".")
            if stem in _TOP_NAMES:
                yield _TOP_NAMES[stem], torch.from_numpy(values)
                continue
            _, layer, part = stem.split(".")
            if part in num_heads and self.architecture == "llama":
                values = half_split_rows(values, num_heads[part])
            yield f"model.layers.{layer}.{_TENSOR_NAMES[part]}.{kind}", torch.from_numpy(values)

    def _number(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own; `default` if the file does not say and there is one."""
        field = self._reader.fields.get(f"{self.architecture}.{key}")
        return default if field is None and default is not None else self._field(f"{self.architecture}.{key}")

    def _field(self, key: str) -> Any:
        return self._reader.fields[key].contents()


def half_split_rows(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q or k in Hugging Face's rope layout, from llama-type GGUF's interleaved one.

    Within a head GGUF stores rows 0, n/2, 1, n/2 + 1, ...; here they become 0, 1, ..., n/2, n/2 + 1, ...
    """
    num_rows, num_cols = values.shape
    pairs = values.reshape(num_heads, num_rows // num_heads // 2, 2, num_cols)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, num_cols)


class TorchExecutor:
    """`forward_logits` over a transformers model, so that the comparison can run on the reference itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.inference_mode()
    def forward_logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Logits after each token, float32 [num_tokens, vocab_size].

        Those of 2,048 tokens at once, as the model holds several copies of what it returns: 8,000 tokens of a vocabulary of
        262,144 would take more memory than most machines have.
        """
        logits = np.empty((len(token_ids), self.model.config.get_text_config().vocab_size), np.float32)
        for begin in range(0, len(token_ids), 2048):
            wanted = torch.arange(begin, min(begin + 2048, len(token_ids)))
            found = self.model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=wanted).logits[0]
            logits[begin : begin + 2048] = found.float().numpy()
        return logits
