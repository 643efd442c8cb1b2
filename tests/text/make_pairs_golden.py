"""Makes golden/pairs.json: texts and pairs by transformers, whole and cut, for `test_pairs.py`. Run by hand, not by pytest.

    python tests/text/make_pairs_golden.py tests/text/golden/pairs.json

Needs transformers 5. The tokenizers are tiny ones of BERT (WordPiece), RoBERTa (byte-level BPE) and XLM-RoBERTa (Unigram).
"""

import json
import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import BertTokenizer, RobertaTokenizer, XLMRobertaTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["", "a", "un able", "The cat sat on the mat, and it was not thé dog.", "[SEP] x </s> y", "Ωmega"]
SIZES = (None, 16, 11, 10, 7)


def tokenizers():
    pieces = [*SPECIAL, *LETTERS, *[f"##{letter}" for letter in LETTERS], "the", "cat", "##able", "un", ".", ",", "on"]
    yield "bert", BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"), ("c", "at")]
    words = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, *["".join(pair) for pair in merges], "<mask>"]
    yield "roberta", RobertaTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=merges)
    scored = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    scored += [(piece, -float(number)) for number, piece in enumerate(("▁", "▁the", "▁cat", "at", *LETTERS, ",", "."), 1)]
    yield "xlm-roberta", XLMRobertaTokenizer(vocab=[*scored, ("<mask>", 0.0)])


def cases(tokenizer):
    # transformers takes an empty second text for none.
    pairs = [(first, None) for first in TEXTS] + [(first, second) for first in TEXTS for second in TEXTS if second]
    for first, second in pairs:
        for size in SIZES:
            for side in ("left", "right"):
                tokenizer.truncation_side = side
                found = tokenizer(
                    first,
                    second,
                    truncation=size is not None,
                    max_length=size,
                    return_token_type_ids=True,
                )
                types = found["token_type_ids"]
                second_at = types.index(1) if 1 in types else 0
                yield [first, second, size, side, found["input_ids"], second_at]
                if size is None:
                    break


def main() -> None:
    result = []
    for name, tokenizer in tokenizers():
        file = json.loads(tokenizer.backend_tokenizer.to_str())
        file["truncation"] = file["padding"] = None
        result.append({"name": name, "tokenizer": file, "cases": list(cases(tokenizer))})
        print(name, len(result[-1]["cases"]), "cases")
    Path(sys.argv[1]).write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
