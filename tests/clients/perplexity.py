"""The perplexity that lm-eval finds through `/v1/completions` beside the one that `make test-parity` computes in process.

    PYTHONPATH=tests .venv/bin/python tests/clients/perplexity.py build/lm-eval-venv/bin/lm_eval http://127.0.0.1:8000

Needs a server with smollm2:135m; run.sh starts one. lm-eval runs in an environment of its own, as a program. No hub is asked:
the text is the excerpt of tests/golden, and the tokenizer's files are made of the GGUF file. Exits with 1 if they differ.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from penstock.models.gguf import read_vocab
from penstock.models.gguf_file import open_gguf
from penstock.text.gguf_vocab import build_backend
from penstock.text.tokenizer import Tokenizer
from support.parity.compare import token_logprobs
from support.parity.executors import find_model, open_executor
from support.parity.golden import GOLDEN_DIR

MODEL = "smollm2:135m"
FOLDER = Path("build/perplexity").resolve()
MAX_DIFFERENCE = 1e-6
"""The share by which the two may differ: log-probabilities are rounded to 32 bits, and each side adds them up its own way."""
TASK = {
    "task": "penstock_texts",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(FOLDER / "texts.json")}},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
}


def texts() -> list[str]:
    """The excerpt in three parts of different lengths, each shorter than a window of lm-eval."""
    lines = (GOLDEN_DIR / "sonnet_excerpt.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return ["".join(lines[begin:end]).strip() for begin, end in ((0, 14), (14, 50), (50, len(lines)))]


def read_tokenizer() -> Tokenizer:
    """The model's tokenizer. Its files for transformers are written into the folder."""
    file = open_gguf(find_model(MODEL).path)
    backend = build_backend(read_vocab(file, len(file.get_list("tokenizer.ggml.tokens", str))))
    tokenizer = Tokenizer(backend)
    backend.encoder.save(str(FOLDER / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer


def perplexities_of_lm_eval(url: str, program: str) -> dict[str, float]:
    (FOLDER / "texts.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    (FOLDER / "task.yaml").write_text(json.dumps(TASK))  # JSON is YAML
    asked = f"model={MODEL},base_url={url}/v1/completions,tokenizer={FOLDER},num_concurrent=2"
    command = [program, "run", "--model", "local-completions", "--model_args", asked, "--tasks", TASK["task"]]
    command += ["--include_path", str(FOLDER), "--output_path", str(FOLDER / "results")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(FOLDER / "cache")}
    subprocess.run(command, check=True, env=os.environ | offline)
    newest = max((FOLDER / "results").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    found = json.loads(newest.read_text())["results"][TASK["task"]]
    return {unit: found[f"{unit}_perplexity,none"] for unit in ("word", "byte")}


def perplexities_of_parity(tokenizer: Tokenizer) -> dict[str, float]:
    """Each text stands behind the token that begins texts, as lm-eval has it."""
    log_likelihood = 0.0
    with open_executor("native", find_model(MODEL), num_tokens=4096) as executor:
        for text in texts():
            token_ids = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
            logits = executor.forward_logits(token_ids[:-1])
            log_likelihood += math.fsum(token_logprobs(logits, token_ids[1:]))
    num_words = sum(len(re.split(r"\s+", text)) for text in texts())
    num_bytes = sum(len(text.encode()) for text in texts())
    return {"word": math.exp(-log_likelihood / num_words), "byte": math.exp(-log_likelihood / num_bytes)}


def main(program: str, url: str) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    ours, theirs = perplexities_of_parity(read_tokenizer()), perplexities_of_lm_eval(url, program)
    difference = max(abs(theirs[unit] / ours[unit] - 1) for unit in ours)
    told = "; ".join(f"{unit} perplexity {theirs[unit]:.7g}, ours {ours[unit]:.7g}" for unit in ours)
    print(f"{'ok  ' if difference < MAX_DIFFERENCE else 'FAIL'} lm-eval {told} (differ by {difference:.1e})", flush=True)
    return 0 if difference < MAX_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
