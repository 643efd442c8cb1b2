"""Does a model find a sentence in a long text as well with keys and values in 4 bits? By type of KV cache.

Sentences with a number each are spread evenly over a text of some thousand tokens, and one question asks for each of them. All
questions of a length share the text, so it is computed once. Answers are greedy; those with the number count.

    python benchmarks/kv_needle.py --text docs/*.md --lengths 8192 16384 32000
    python benchmarks/kv_needle.py --text docs/*.md --lengths 2048 --model smollm2:135m

The last line printed is one JSON object: for each length and type how many were found, and how many answers are those of int8.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock import LLM, SamplingParams
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from penstock.models.load import load_model
from penstock.text.tokenizer import load_tokenizer
from penstock.types.kv_dtype import KvDtype

CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Hanoi", "Quito", "Riga", "Perth", "Cairo", "Osaka")
ROOM_TOKENS = 400  # for the needles, a question and the template


def number_of(idx: int) -> str:
    return str(10_000 + 7919 * (idx + 3) % 89_000)


def haystack(text: str, model: str, num_tokens: int) -> str:
    """Return the beginning of a text, with the needles evenly spaced."""
    tokenizer = load_tokenizer(load_model(resolve(model, default_cache_dir())).tokenizer_source)
    token_ids = tokenizer.encode(text, add_special_tokens=False)[: num_tokens - ROOM_TOKENS]
    if len(token_ids) < num_tokens - ROOM_TOKENS:
        raise SystemExit(f"the text has {len(token_ids)} tokens, and {num_tokens - ROOM_TOKENS} are needed")
    step = len(token_ids) // len(CITIES)
    parts = []
    for idx, city in enumerate(CITIES):
        parts += [
            tokenizer.decode(token_ids[idx * step : (idx + 1) * step]),
            f"\n\nThe code of {city} is {number_of(idx)}.\n\n",
        ]
    return "".join(parts)


def ask(model: str, text: str, num_tokens: int, dtype: KvDtype) -> list[str]:
    with LLM(model, max_model_len=num_tokens, kv_cache_dtype=dtype.value) as llm:
        answers = []
        for city in CITIES:  # one after another: each finds the text in the cache
            question = f"{text}\n\nWhat is the code of {city} in the text above? Answer with the number alone."
            (output,) = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=12))
            answers.append(output.outputs[0].text)
            print(num_tokens, dtype.value, city, repr(answers[-1]), flush=True)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--model", default="qwen2.5-coder:1.5b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32000], help="tokens")
    parser.add_argument("--dtypes", type=KvDtype, nargs="+", default=[KvDtype.INT8, KvDtype.INT4])
    args = parser.parse_args()
    text = "".join(path.read_text(encoding="utf-8") for path in args.text)
    results = []
    for num_tokens in args.lengths:
        hay = haystack(text, args.model, num_tokens)
        answers = {dtype: ask(args.model, hay, num_tokens, dtype) for dtype in args.dtypes}
        found = {dtype.value: sum(number_of(idx) in answer for idx, answer in enumerate(own)) for dtype, own in answers.items()}
        first = answers[args.dtypes[0]]
        alike = {dtype.value: sum(a == b for a, b in zip(own, first, strict=True)) for dtype, own in answers.items()}
        results.append({"tokens": num_tokens, "asked": len(CITIES), "found": found, f"as {args.dtypes[0].value}": alike})
        print(results[-1], flush=True)
    print(json.dumps({"benchmark": "kv_needle", "model": args.model, "lengths": results}))


if __name__ == "__main__":
    main()
