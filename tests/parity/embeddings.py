"""Compares the embeddings of real texts with transformers': cosines, and what a search finds with either.

    python -m tests.parity.embeddings make MODEL_DIRECTORY ANSWERS.npz [--traces ../shared/traces]
    python -m tests.parity.embeddings compare MODEL ANSWERS.npz [--weight-dtype bf16]

`make` runs in an environment with torch and transformers (`tests/parity/venv.sh`), `compare` in Penstock's. Texts are turns of
ShareGPT conversations, and the search is for the reply to each question among all replies. They are users' text, so the file is
not to be committed. The reference pools as `1_Pooling` says and normalises.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
NUM_PAIRS = 500
"""Questions and their replies: twice as many texts."""
NUM_FOUND = 10
MIN_CHARS = 20
MIN_COSINE = {"bf16": 0.9999, "int8": 0.998}
MAX_LOST_RECALL = 0.005


def question_pairs(traces: Path) -> list[tuple[str, str]]:
    """The first question of each conversation and its reply, of as many conversations as are wanted. Raises ValueError."""
    pairs: list[tuple[str, str]] = []
    with (traces / "sharegpt_1000.jsonl").open() as lines:
        for line in lines:
            turns = [turn["value"].strip() for turn in json.loads(line)["conversations"][:2]]
            if len(turns) == 2 and min(map(len, turns)) >= MIN_CHARS:
                pairs.append((turns[0], turns[1]))
            if len(pairs) == NUM_PAIRS:
                return pairs
    raise ValueError(f"{traces} has {len(pairs)} conversations with a question and a reply, not {NUM_PAIRS}")


def make(model_directory: Path, output: Path, traces: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    pooling = json.loads((model_directory / "1_Pooling" / "config.json").read_text())
    max_tokens = json.loads((model_directory / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    texts = [text for pair in question_pairs(traces) for text in pair]
    token_ids = [tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"] for text in texts]
    answers: dict[str, Any] = {"texts": json.dumps(texts), "token_ids": json.dumps(token_ids), "max_tokens": max_tokens}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        model = AutoModel.from_pretrained(model_directory, dtype=dtype).eval()
        with torch.inference_mode():
            states = [model(torch.tensor([ids])).last_hidden_state[0].float().numpy() for ids in token_ids]
        answers[name] = np.stack([pooled(one, pooling) for one in states])
        print(f"{name}: {len(texts)} texts", flush=True)
    np.savez_compressed(output, **answers)


def pooled(states: F32, pooling: dict[str, Any]) -> F32:
    if pooling.get("pooling_mode_mean_tokens"):
        vector = states.mean(axis=0)
    elif pooling.get("pooling_mode_cls_token"):
        vector = states[0]
    elif pooling.get("pooling_mode_lasttoken"):
        vector = states[-1]
    else:
        raise ValueError(f"no pooling that is known: {pooling}")
    result: F32 = (vector / np.linalg.norm(vector)).astype(np.float32)
    return result


def cosines(actual: F32, expected: F32) -> F32:
    """The cosine of each text's two vectors. [num_texts]"""
    actual = actual / np.linalg.norm(actual, axis=1, keepdims=True)
    result: F32 = (actual * expected).sum(axis=1)
    return result


def recall(vectors: F32) -> float:
    """The share of questions whose own reply is among the nearest. Vectors are of question, reply, question ..."""
    questions, replies = vectors[::2], vectors[1::2]
    scores = questions @ replies.T
    own = np.diag(scores)[:, None]
    return float(((scores > own).sum(axis=1) < NUM_FOUND).mean())


def embed(model_name: str, texts: Sequence[str], max_tokens: int, dtype: str, variant: str) -> tuple[list[list[int]], F32]:
    """Tokens of the texts, and their vectors on the native backend. [num_texts, width]"""
    from penstock.backends.native.executor import NativeExecutor
    from penstock.models import architectures
    from penstock.models.load import load_model
    from penstock.testing import make_core, make_text, run_to_completion, sizes_of, text_capacity
    from penstock.text.tokenizer import load_tokenizer
    from penstock.types.events import Add
    from support.parity.executors import find_model

    source = find_model(model_name)
    model = load_model(source, served_len=max_tokens)
    tokens = load_tokenizer(source.path / "tokenizer.json").encode_texts(texts, max_tokens=max_tokens)
    sizes = sizes_of(text_capacity(max_tokens, max_rows=64, max_step_tokens=max(512, max_tokens)))
    with closing(
        NativeExecutor(model, architectures.describe(model.spec), variant=variant, rounds_floats=dtype == "int8", **sizes)
    ) as executor:
        core = make_core(executor.capacity, enable_prefix_caching=False)
        requests = [make_text(str(i), one.token_ids) for i, one in enumerate(tokens)]
        outcomes = run_to_completion(core, executor, *map(Add, requests))
    states = [np.frombuffer(outcomes[request.request_id].last.states, np.float32) for request in requests]
    return [list(one.token_ids) for one in tokens], np.stack(states)


def compare(model_name: str, path: Path, dtype: str, variant: str) -> bool:
    """Prints the figures. Returns whether the bounds hold."""
    answers = np.load(path)
    token_ids, vectors = embed(model_name, json.loads(str(answers["texts"])), int(answers["max_tokens"]), dtype, variant)
    expected: F32 = answers["f32"]
    found = np.sort(cosines(vectors, expected))
    own, theirs = recall(vectors), recall(expected)
    num_different = sum(one != other for one, other in zip(token_ids, json.loads(str(answers["token_ids"])), strict=True))
    print(f"{num_different} of {len(token_ids)} texts have other tokens  [wanted: 0]")
    print(
        f"cosine with float32: least {found[0]:.5f}, first percentile {found[len(found) // 100]:.5f}, mean {found.mean():.5f} "
        f"(transformers in bf16: least {cosines(answers['bf16'], expected).min():.5f})  [wanted: least >= {MIN_COSINE[dtype]}]"
    )
    print(f"recall@{NUM_FOUND}: {own:.3f}, in float32 {theirs:.3f}  [wanted: within {MAX_LOST_RECALL}]")
    return not num_different and bool(found[0] >= MIN_COSINE[dtype]) and own >= theirs - MAX_LOST_RECALL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("model", type=Path, help="a Hugging Face directory with the files of sentence-transformers")
    maker.add_argument("answers", type=Path)
    maker.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with sharegpt_1000.jsonl")
    comparer = commands.add_parser("compare")
    comparer.add_argument("model", help="catalogue name or path")
    comparer.add_argument("answers", type=Path)
    comparer.add_argument("--weight-dtype", choices=sorted(MIN_COSINE), default="int8")
    comparer.add_argument("--variant", default="", help="instruction set (default: the best one)")
    args = parser.parse_args()
    if args.command == "make":
        make(args.model, args.answers, args.traces)
        return 0
    return 0 if compare(args.model, args.answers, args.weight_dtype, args.variant) else 1


if __name__ == "__main__":
    sys.exit(main())
