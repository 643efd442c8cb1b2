"""Small vocabularies that tests of `penstock.text` share, each of a real kind."""

from functools import cache
from itertools import pairwise

import pytest

from penstock.text.vocabulary import byte_level_alphabet
from penstock.types.vocab import GgufVocab

CORPUS = (
    "the cat sat on the mat and the rat sat on the cat while banana bandana cabana and abacus were "
    "a test of the merging of the pieces in the text that the tester tested   with  some    runs of spaces "
    "été déjà vu naïve café 東京 京都 東京都 "
)
NUM_BYTES = 256


def make_byte_level_vocab(pre: str = "smollm", **changes) -> GgufVocab:
    """Two control tokens, a user-defined one, an unused one, all bytes, then the pieces of a few merges."""
    tokens = ["<|end|>", "<|start|>", "<think>", "[PAD3]"]
    types = [3, 3, 4, 5]
    characters = list(byte_level_alphabet())
    merges = ["t h", "th e", "Ġ the", "i n", "Ġ a", "n d", "Ġa nd", "1 2", "12 3", "Ġ Ġ", "Ã ©", "ð Ł", "ðŁ ĳ"]
    pieces = characters + [merge.replace(" ", "") for merge in merges]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens + pieces,
        "token_types": types + [1] * len(pieces),
        "merges": merges,
        "scores": [],
        "bos_token_id": 1,
        "eos_token_id": 0,
        "unknown_token_id": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": False,
    }
    return GgufVocab(**(fields | changes))


def count_pairs(words: list[list[str]]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for word in words:
        for pair in pairwise(word):
            counts[pair] = counts.get(pair, 0) + 1
    return counts


@cache
def train_pieces(corpus: str, num_pieces: int) -> tuple[str, ...]:
    """Pieces of a BPE training, most frequent pair first, across word borders where they are frequent."""
    words = [list("▁" + word) for word in corpus.split()]
    pieces: list[str] = []
    while len(pieces) < num_pieces:
        counts = count_pairs(words)
        left, right = max(counts, key=lambda pair: (counts[pair], pair))
        pieces.append(left + right)
        for word in words:
            for at in range(len(word) - 1):
                if word[at : at + 2] == [left, right]:
                    word[at : at + 2] = [left + right]
    return tuple(dict.fromkeys(pieces))


def make_sentencepiece_vocab(**changes) -> GgufVocab:
    """Laid out like Llama 2's: control, bytes, trained pieces by rank, runs of spaces far below, single characters last."""
    trained = train_pieces(CORPUS, 60)
    runs = ["▁" * count for count in range(2, 9)]
    characters = sorted(set(CORPUS.replace(" ", "▁")))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES)), *trained, *runs, *characters]
    scores = [0.0] * (3 + NUM_BYTES) + [-float(rank) for rank in range(len(trained))] + [-1e9] * len(runs)
    scores += [-1000.0 - rank for rank in range(len(characters))]
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_types": [2, 3, 3] + [6] * NUM_BYTES + [1] * (len(tokens) - 3 - NUM_BYTES),
        "merges": [],
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": True,
    }
    return GgufVocab(**(fields | changes))


@pytest.fixture(scope="session")
def byte_level_vocab():
    return make_byte_level_vocab


@pytest.fixture(scope="session")
def sentencepiece_vocab():
    return make_sentencepiece_vocab
