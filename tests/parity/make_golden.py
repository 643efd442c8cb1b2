"""Makes the golden files from transformers. Run by hand or by `run.sh`, in an environment with torch; tests only read them.

    python -m tests.parity.make_golden MODEL.gguf --output tests/golden [--windows ../shared/traces]

Greedy paths come from transformers' `generate` in batches, and are then confirmed by a forward pass of each alone, which
gives the logits that are stored. With --windows the perplexity windows are scored too: their tokens go to windows.npz
(not to be committed, as they hold users' text), the sums to perplexity.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from support.parity.compare import token_logprobs
from support.parity.golden import GOLDEN_DIR, FloatArray, GreedyCase, TextCase, save_greedy, save_texts, tokens_sha256
from support.parity.prompts import PROMPTS, ParityPrompt
from support.parity.reference_model import GgufReference, TorchExecutor
from support.parity.windows import WINDOW_TOKENS, make_windows

NUM_STEPS = 64
NUM_TOP = 10
NUM_EXCERPT_TOKENS = 1024
GENERATE_ROWS = 8
FULL_LOGITS_OF = ("capital", "fibonacci", "multi_turn")


class GoldenMaker:
    """Holds the reference in both precisions while the files are made."""

    def __init__(self, model_path: Path) -> None:
        self.gguf = GgufReference(model_path)
        self.tokenizer = self.gguf.tokenizer()
        self.template = jinja2.Environment(autoescape=False).from_string(self.gguf.chat_template)
        self.f32 = TorchExecutor(self.gguf.model(torch.float32))
        self.bf16 = TorchExecutor(self.gguf.model(torch.bfloat16))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[dict[str, str]], *, asks: bool = False) -> str:
        return self.template.render(messages=list(messages), add_generation_prompt=asks, eos_token=self.gguf.eos_token)

    def prompt_ids(self, prompt: ParityPrompt) -> list[int]:
        return self.encode(self.render(prompt.messages, asks=True) if prompt.messages else prompt.text)

    def text_case(self, name: str, token_ids: Sequence[int], f32_logits: FloatArray | None = None) -> TextCase:
        ids = np.array(token_ids, np.int32)
        inputs = [int(token_id) for token_id in ids[:-1]]
        f32 = token_logprobs(self.f32.forward_logits(inputs) if f32_logits is None else f32_logits, ids[1:])
        return TextCase(name, ids, f32, token_logprobs(self.bf16.forward_logits(inputs), ids[1:]))

    def greedy_cases(self, chosen: Sequence[ParityPrompt]) -> list[GreedyCase]:
        prompts = [self.prompt_ids(prompt) for prompt in chosen]
        paths = greedy_paths(self.f32.model, prompts)
        return [self._confirm(p.name, ids, path) for p, ids, path in zip(chosen, prompts, paths, strict=True)]

    def _confirm(self, name: str, prompt_ids: list[int], path_ids: list[int]) -> GreedyCase:
        logits = self.f32.forward_logits(prompt_ids + path_ids[:-1])
        steps = logits[len(prompt_ids) - 1 :]
        if steps.argmax(axis=1).tolist() != path_ids:
            raise RuntimeError(f"{name}: batched generation and a single forward pass disagree; the path has a tie")
        top_ids = np.argsort(-steps, axis=1, kind="stable")[:, :NUM_TOP].astype(np.int32)
        text = self.text_case(name, prompt_ids + path_ids, logits)
        print(f"  {name}: {len(prompt_ids)} tokens -> {self.tokenizer.decode(path_ids)[:60]!r}", flush=True)
        return GreedyCase(text, len(prompt_ids), top_ids, np.take_along_axis(steps, top_ids, axis=1))


def greedy_paths(model: PreTrainedModel, prompts: Sequence[list[int]]) -> list[list[int]]:
    """NUM_STEPS tokens for each prompt, end tokens not stopping it; equal lengths are batched as far as possible."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    paths: dict[int, list[int]] = {}
    config = GenerationConfig(do_sample=False, max_new_tokens=NUM_STEPS, eos_token_id=None, pad_token_id=0)
    model.generation_config = config  # as an argument it would be completed with the model's own, end token included
    for begin in range(0, len(order), GENERATE_ROWS):
        batch = order[begin : begin + GENERATE_ROWS]
        width = max(len(prompts[i]) for i in batch)
        ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in batch])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in batch])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask)
        print(f"  generated {begin + len(batch)} of {len(order)}", flush=True)
        paths |= {i: out[row, width:].tolist() for row, i in enumerate(batch)}
    return [paths[i] for i in range(len(prompts))]


def write_greedy(maker: GoldenMaker, output: Path, num_prompts: int) -> None:
    cases = maker.greedy_cases(PROMPTS[:num_prompts])
    save_greedy(output, cases)
    last = {c.name: maker.f32.forward_logits(c.prompt_ids)[-1] for c in cases if c.name in FULL_LOGITS_OF}
    np.savez_compressed(output / "last_logits.npz", **last)
    decode = maker.tokenizer.decode
    texts = {
        case.name: {
            "prompt": decode(case.prompt_ids, skip_special_tokens=False),
            "reply": decode(case.path_ids.tolist(), skip_special_tokens=False),
        }
        for case in cases
    }
    (output / "greedy.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")


def write_texts(maker: GoldenMaker, output: Path) -> None:
    token_ids = maker.encode((GOLDEN_DIR / "sonnet_excerpt.txt").read_text())[:NUM_EXCERPT_TOKENS]
    save_texts(output / "texts.npz", [maker.text_case("sonnet_excerpt", token_ids)])


def write_windows(maker: GoldenMaker, output: Path, traces_dir: Path, window_tokens: int) -> None:
    texts = []
    for window in make_windows(traces_dir, maker.encode, maker.render, window_tokens):
        texts.append(maker.text_case(window.name, window.token_ids))
        print(f"  {window.name}: {np.exp(-texts[-1].logprobs_f32.mean()):.3f}", flush=True)
    save_texts(output / "windows.npz", texts)
    rows = [_window_row(text) for text in texts]
    num_predicted = sum(len(text.logprobs_f32) for text in texts)
    totals = {f"perplexity_{k}": float(np.exp(sum(row[f"nll_{k}"] for row in rows) / num_predicted)) for k in ("f32", "bf16")}
    document = {"num_predicted_tokens": num_predicted, **totals, "windows": rows}
    (output / "perplexity.json").write_text(json.dumps(document, indent=1) + "\n")


def _window_row(text: TextCase) -> dict[str, Any]:
    nll = {"nll_f32": _nll(text.logprobs_f32), "nll_bf16": _nll(text.logprobs_bf16)}
    return {"name": text.name, "tokens_sha256": tokens_sha256(text.token_ids), **nll}


def _nll(logprobs: FloatArray) -> float:
    return round(-float(logprobs.sum(dtype=np.float64)), 4)


def write_manifest(model_path: Path, output: Path) -> None:
    manifest = {
        "model": model_path.name,
        "model_sha256": hashlib.sha256(model_path.read_bytes()).hexdigest(),
        "tools": {name: version(name) for name in ("torch", "transformers", "gguf", "tokenizers", "numpy")},
        "python": platform.python_version(),
        "num_steps": NUM_STEPS,
    }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--windows", type=Path, help="folder with sonnet.txt and sharegpt_1000.jsonl")
    parser.add_argument("--window-tokens", type=int, default=WINDOW_TOKENS, help="length of a window (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="only the first of them: for larger models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    maker = GoldenMaker(args.model)
    print("greedy paths", flush=True)
    write_greedy(maker, args.output, args.prompts)
    write_texts(maker, args.output)
    write_manifest(args.model, args.output)
    if args.windows:
        print("perplexity windows", flush=True)
        write_windows(maker, args.output, args.windows, args.window_tokens)


if __name__ == "__main__":
    main()
