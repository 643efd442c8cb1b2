"""Trains LoRA adapters of the default model with PEFT, on this repository's own pages. Run by hand, where torch and PEFT are.

    python -m tests.parity.train_adapters MODEL.gguf --output DIR [--steps 50]

The first one, of rank 4 on q and v, is the one in tests/golden/adapters; the others are for measurements. All are trained in
float32 from the exact values of the file's weights, with a fixed seed, and saved in bfloat16 by PEFT itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from support.parity.golden import GOLDEN_DIR
from support.parity.reference_model import GgufReference

ADAPTERS = {
    "qv_r4": LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "all_r16": LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM"),
}
NUM_TOKENS = 256
LEARNING_RATE = 2e-3


def chunks(reference: GgufReference, seed: int) -> Iterator[torch.Tensor]:
    """Pieces of the pages in docs, in an order that the seed makes, for ever. [1, NUM_TOKENS]"""
    pages = sorted((GOLDEN_DIR.parents[1] / "docs").rglob("*.md"))
    tokenizer = reference.tokenizer()
    token_ids = [id_ for page in pages for id_ in tokenizer.encode(page.read_text(), add_special_tokens=False).ids]
    order = torch.Generator().manual_seed(seed)
    while True:
        first = int(torch.randint(len(token_ids) - NUM_TOKENS, (1,), generator=order))
        yield torch.tensor([token_ids[first : first + NUM_TOKENS]])


def train(reference: GgufReference, name: str, output: Path, num_steps: int) -> None:
    torch.manual_seed(0)
    model = get_peft_model(reference.model(), ADAPTERS[name]).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    texts, began, losses = chunks(reference, 0), time.monotonic(), []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 5, 2 * (num_steps - step) / num_steps)
        token_ids = next(texts)
        loss = model(token_ids, labels=token_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if step % 10 == 9:
            print(f"{name}: {step + 1} steps, loss {sum(losses[-10:]) / 10:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    for module in model.modules():
        for kind in ("lora_A", "lora_B"):
            if hasattr(module, kind):
                getattr(module, kind).to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(output / name, save_embedding_layers=False)
    (output / name / "README.md").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the default model's GGUF file")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", choices=ADAPTERS, nargs="*", default=list(ADAPTERS))
    args = parser.parse_args()
    reference = GgufReference(args.model)
    for name in args.only:
        train(reference, name, args.output, args.steps)


if __name__ == "__main__":
    main()
