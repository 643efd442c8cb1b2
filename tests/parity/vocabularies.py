"""The tokenizers of GGUF files against llama.cpp's own test vectors: `make test-parity` runs it, or `python -m
tests.parity.vocabularies [FOLDER]`.

The vocabularies (`models/ggml-vocab-*.gguf`, MBs each) are in the source package of llama-cpp-python, which pip fetches into
build/vocabularies, unless FOLDER has them. Beside most lie texts (`.inp`) and their tokens (`.out`). The digests are in
tests/golden/vocabularies.json: of each file, and of the tokens that we make of all texts, also where there are no `.out`.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from penstock.models.gguf import read_vocab
from penstock.models.gguf_file import open_gguf
from penstock.text.tokenizer import load_tokenizer

PACKAGE = "llama-cpp-python==0.3.36"
GOLDEN = Path(__file__).parents[1] / "golden" / "vocabularies.json"
FOLDER = Path("build/vocabularies")
SEPARATOR = "\n__ggml_vocab_test__\n"
NORMALISED = {"qwen35": "text is brought into NFC first, as transformers' Qwen3_5Tokenizer does and llama.cpp does not"}
"""Vocabularies of which we follow the model's makers, and not llama.cpp."""


def fetch(folder: Path) -> None:
    """Put the vocabularies there, unless they are there already."""
    if any(folder.glob("ggml-vocab-*.gguf")):
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = ["pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), PACKAGE]
    subprocess.run([sys.executable, "-m", *command], check=True)
    [package] = folder.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        for member in archive:
            name = Path(member.name).name
            if member.isfile() and name.startswith("ggml-vocab-") and (data := archive.extractfile(member)) is not None:
                (folder / name).write_bytes(data.read())
    package.unlink()


def tokens_of(path: Path, texts: list[str]) -> list[list[int]]:
    file = open_gguf(path)
    tokenizer = load_tokenizer(read_vocab(file, len(file.get_list("tokenizer.ggml.tokens", str))))
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def main() -> int:
    """The exit code: 1 if a token differs, or a digest. With --write the digests are written anew."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--write"]
    folder = Path(arguments[0]) if arguments else FOLDER
    fetch(folder)
    standard = (folder / "ggml-vocab-llama-spm.gguf.inp").read_text(encoding="utf-8").split(SEPARATOR)
    found: dict[str, dict[str, str | int]] = {}
    num_wrong = 0
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        name = path.stem.removeprefix("ggml-vocab-")
        inputs, outputs = path.with_suffix(".gguf.inp"), path.with_suffix(".gguf.out")
        texts = inputs.read_text(encoding="utf-8").split(SEPARATOR) if inputs.is_file() else standard
        tokens = tokens_of(path, texts)
        words = "no vectors of llama.cpp: the digest alone"
        if outputs.is_file():
            expected = [[int(token) for token in line.split()] for line in outputs.read_text(encoding="utf-8").split("\n")]
            differ = [text for text, ours, theirs in zip(texts, tokens, expected, strict=False) if ours != theirs]
            words = f"{len(differ)} of {len(texts)} texts differ" + (f" ({NORMALISED[name]})" if name in NORMALISED else "")
            num_wrong += 0 if name in NORMALISED else len(differ)
        found[name] = {
            "file": hashlib.sha256(path.read_bytes()).hexdigest(),
            "texts": len(texts),
            "tokens": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
        }
        print(f"{name:16} {words}")
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    changed = [name for name in golden if golden[name] != found.get(name)]
    print(f"{len(found)} vocabularies, {num_wrong} texts that differ, digests changed: {', '.join(changed) or 'none'}")
    return int(bool(num_wrong or changed))


if __name__ == "__main__":
    sys.exit(main())
