"""Train a draft head (EAGLE-3) for a small model, from the model's own answers. It needs torch: pip install torch

    python benchmarks/train_head.py ./smollm2-head --model smollm2:135m --minutes 30
    python benchmarks/speculation.py --draft ./smollm2-head

The model answers questions of ShareGPT greedily, and steps that keep the residual streams before three of its layers read the
chats again. The head learns to guess tokens from these streams, and a token further from its own. The last fifth of the chats
is held out. The last line says how many of their tokens were guessed right, as a share of all tokens and as a share of those
in the head's vocabulary.

Source: the loss over several steps is that of EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as in PyTorch's documentation
from workloads import DEFAULT_TRACES, trace_file

from penstock import LLM, SamplingParams
from penstock.backends.native.executor import NativeExecutor
from penstock.lab.traces import read_conversations
from penstock.models.architectures import describe
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from penstock.models.eagle import with_sources
from penstock.models.load import load_model
from penstock.models.weights import LoadedModel
from penstock.types.model_spec import GatedMlp
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams as RowSampling

NUM_LOGITS, LENGTH, BATCH, STEPS = 4096, 256, 8, 2
"""Tokens that the head can guess; tokens of a chat and chats of a training step; guesses, each from the one before."""
THETA, PEAK_RATE = 10_000.0, 6e-4


class Head(nn.Module):
    """The layer of `models/eagle.py`, in PyTorch. Parameters have the names of SpecForge's checkpoints."""

    def __init__(self, model: LoadedModel, guessable: NDArray[np.int64]) -> None:
        super().__init__()
        spec = model.spec
        attention, mlp, size = spec.layers[0].attention, spec.layers[0].mlp, spec.hidden_size
        assert isinstance(mlp, GatedMlp)
        self.heads, self.kv_heads, self.dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self.eps, self.inner = spec.norm_eps, mlp.intermediate_size
        self.embed = torch.tensor(model.weights["embed"].dequantize())
        output = self.embed if spec.tie_word_embeddings else torch.tensor(model.weights["output"].dequantize())
        width, kv_width = self.heads * self.dim, self.kv_heads * self.dim
        shapes = {"q": (width, 2 * size), "k": (kv_width, 2 * size), "v": (kv_width, 2 * size), "o": (size, width)}
        matrices = {f"midlayer.self_attn.{name}_proj": shape for name, shape in shapes.items()}
        matrices |= {f"midlayer.mlp.{name}_proj": (self.inner, size) for name in ("gate", "up")}
        matrices |= {"midlayer.mlp.down_proj": (size, self.inner), "fc": (size, 3 * size)}
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
        values = {name: 0.02 * torch.randn(shape) for name, shape in matrices.items()} | {n: torch.ones(size) for n in norms}
        values["fc"][:, 2 * size :] += torch.eye(size)  # at first, features are the last of the three streams
        values |= {"norm": torch.tensor(model.weights["norm"].dequantize()[0]), "lm_head": output[torch.tensor(guessable)]}
        self.values = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(one) for name, one in values.items()})

    def named(self) -> dict[str, Tensor]:
        return {f"{name.replace('/', '.')}.weight": value.detach() for name, value in self.values.items()}

    def by(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.values[name.replace(".", "/")])

    def norm(self, x: Tensor, name: str) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.values[name.replace(".", "/")]

    def turned(self, x: Tensor, first: int) -> Tensor:
        inv_freq = THETA ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = (first + torch.arange(x.shape[2]))[:, None] * inv_freq
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    def forward(self, tokens: Tensor, sources: Tensor) -> list[Tensor]:
        """Return the logits of `STEPS` guesses after each token: [chats, LENGTH, NUM_LOGITS] each.

        `tokens` [chats, LENGTH + STEPS + 1]; `sources` [chats, LENGTH, 3 * size]. A guess after the first reads the head's own
        states for the tokens that were guessed, and features for those before.
        """
        states, logits = self.by(sources, "fc").float(), []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        unseen = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        for step in range(STEPS):
            token = self.norm(self.embed[tokens[:, 1 + step : 1 + step + LENGTH]], "midlayer.input_layernorm")
            both = torch.cat([token, self.norm(states, "midlayer.hidden_norm")], -1)
            q, k, v = (
                self.by(both, f"midlayer.self_attn.{name}_proj").unflatten(-1, (-1, self.dim)).transpose(1, 2) for name in "qkv"
            )
            q, k = self.turned(q, step) / math.sqrt(self.dim), self.turned(k, step)
            keys.append(k.repeat_interleave(self.heads // self.kv_heads, 1))
            values.append(v.float().repeat_interleave(self.heads // self.kv_heads, 1))
            scores = [q @ keys[0].transpose(-1, -2) + unseen, *((q * own).sum(-1, keepdim=True) for own in keys[1:])]
            shares = torch.softmax(torch.cat(scores, -1), -1)
            mixed = shares[..., :LENGTH] @ values[0]
            for place, own in enumerate(values[1:]):
                mixed = mixed + shares[..., LENGTH + place, None] * own
            x = states + self.by(mixed.transpose(1, 2).flatten(2), "midlayer.self_attn.o_proj")
            y = self.norm(x, "midlayer.post_attention_layernorm")
            inner = F.silu(self.by(y, "midlayer.mlp.gate_proj")) * self.by(y, "midlayer.mlp.up_proj")
            states = x + self.by(inner, "midlayer.mlp.down_proj").float()
            logits.append(self.by(self.norm(states, "norm"), "lm_head"))
        return logits


def ask(name: str, num: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of `num` questions of ShareGPT and of the model's answers."""
    chats = (turns[0][0] for turns in read_conversations(trace_file(DEFAULT_TRACES)) if turns)
    questions = [question for question in chats if len(question) < 1500][:num]
    with LLM(name) as llm:
        asked = [[{"role": "user", "content": question}] for question in questions]
        answers = llm.chat(asked, SamplingParams(max_tokens=LENGTH, temperature=0.0))
    return [(list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)) for one in answers]


def read(model: LoadedModel, layers: Sequence[int], chats: Sequence[Sequence[int]]) -> list[NDArray[np.float16]]:
    """Return the residual streams of each chat's tokens. [num_tokens, 3 * hidden_size]"""
    sizes = {"num_blocks": 200, "block_size": 16, "max_rows": 1, "max_step_tokens": 2048, "max_model_len": 2048}
    found: list[NDArray[np.float16]] = []
    with closing(NativeExecutor(model, with_sources(describe(model.spec), layers), **sizes)) as executor:
        for number, tokens in enumerate(chats):
            blocks = tuple(range(1, 2 + len(tokens) // 16))
            admit = AdmitRow(str(number), tuple(tokens), len(tokens), blocks, 0, RowSampling(temperature=0.0))
            row = RowPlan(str(number), 0, len(tokens), (), 0)
            plan = StepPlan(number, 0, (admit,), (row,), (str(number - 1),) if number else ())
            kept = executor.collect(executor.submit(plan)).features
            found.append(np.frombuffer(kept, np.float32).reshape(len(tokens), -1).astype(np.float16))
    return found


class Chats:
    """Chats as batches of tokens, residual streams and the numbers of the logits that are right."""

    def __init__(self, chats: Sequence[Sequence[int]], sources: Sequence[NDArray[np.float16]], guessable: NDArray[np.int64]):
        self._chats, self._sources = chats, sources
        self._logit_of = np.full(max(map(max, chats)) + 1, -100)
        known = guessable[guessable < len(self._logit_of)]
        self._logit_of[known] = np.arange(len(known))

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the end of each chat. Right is -100 for tokens that the head can't guess, and -200 after the end."""
        tokens = np.zeros((len(numbers), LENGTH + STEPS + 1), np.int64)
        right = np.full(tokens.shape, -200)
        sources = np.zeros((len(numbers), LENGTH, self._sources[0].shape[1]), np.float32)
        for row, number in enumerate(numbers):
            chat = self._chats[number][-tokens.shape[1] :]
            tokens[row, : len(chat)], right[row, : len(chat)] = chat, self._logit_of[chat]
            found = self._sources[number][-len(chat) :][:LENGTH]
            sources[row, : len(found)] = found
        return torch.tensor(tokens), torch.tensor(sources), torch.tensor(right)


def losses(head: Head, batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, list[float], list[float]]:
    """Return the loss and, for each step, the right guesses as a share of all tokens and of those in the head's vocabulary."""
    tokens, sources, right = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(tokens, sources)
    loss, of_all, of_known = torch.zeros(()), [], []
    for step, one in enumerate(logits):
        wanted = right[:, 2 + step : 2 + step + LENGTH][:, : LENGTH - 1 - step]
        guesses = one[:, : wanted.shape[1]].float()
        loss = loss + 0.8**step * F.cross_entropy(guesses.flatten(0, 1), wanted.clamp(min=-100).flatten(), ignore_index=-100)
        num_right = (guesses.argmax(-1) == wanted).sum().item()
        of_all.append(num_right / max(1, (wanted > -200).sum().item()))
        of_known.append(num_right / max(1, (wanted >= 0).sum().item()))
    return loss, of_all, of_known


def train(head: Head, chats: Chats, num: int, minutes: float) -> None:
    """Train on the first `num` chats. The rate of learning follows the time: a warm-up, then a half cosine."""
    optimiser = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    draw, began, steps = np.random.default_rng(0), time.monotonic(), 0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = PEAK_RATE * min(1, (steps + 1) / 30) * max(0.05, 0.5 + 0.5 * math.cos(math.pi * share))
        loss, of_all, _ = losses(head, chats.batch(draw.choice(num, min(BATCH, num), replace=False).tolist()))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimiser.step()
        steps += 1
        if steps % 20 == 0:
            print(f"{share:.0%}: loss {loss.item():.2f}, right {', '.join(f'{one:.2f}' for one in of_all)}", flush=True)


def save(folder: Path, head: Head, model: LoadedModel, guessable: NDArray[np.int64], layers: Sequence[int]) -> None:
    """Write the head as a safetensors folder, in bf16."""
    tensors = {name: ("BF16", value.to(torch.bfloat16).contiguous().view(torch.int16)) for name, value in head.named().items()}
    tensors["d2t"] = "I64", torch.tensor(guessable - np.arange(len(guessable)))
    header, at = {}, 0
    for name, (dtype, value) in tensors.items():
        size = value.numel() * value.element_size()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    data = b"".join(value.numpy().tobytes() for _, value in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": model.spec.vocab_size,
        "draft_vocab_size": len(guessable),
        "hidden_size": model.spec.hidden_size,
        "intermediate_size": head.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": head.eps,
        "rope_theta": THETA,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the head")
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--chats", type=int, default=800)
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    asked = ask(args.model, args.chats)
    model = load_model(resolve(args.model, default_cache_dir()))
    num_layers, num = model.spec.num_layers, len(asked) * 4 // 5
    layers = (2, num_layers // 2, num_layers - 3)
    counts = Counter(token for _, answer in asked[:num] for token in answer)
    guessable = np.array(sorted(token for token, _ in counts.most_common(NUM_LOGITS)))
    chats = [[*question, *answer] for question, answer in asked]
    batches = Chats(chats, read(model, layers, chats), guessable)
    torch.manual_seed(0)
    head = Head(model, guessable)
    print(f"{sum(map(len, chats))} tokens in {len(chats)} chats")
    train(head, batches, num, args.minutes)
    save(args.folder, head, model, guessable, layers)
    with torch.no_grad():
        shares = np.mean([losses(head, batches.batch([number]))[1:] for number in range(num, len(chats))], axis=0)
    of_all, of_known = ([round(float(one), 3) for one in row] for row in shares)
    print(json.dumps({"benchmark": "train_head", "model": args.model, "right": of_all, "right_of_guessable": of_known}))


if __name__ == "__main__":
    main()
