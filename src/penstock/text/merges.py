"""Merge rules of a SentencePiece BPE vocabulary, derived from its scores. Used by `gguf_vocab`; knows no tokenizer.

SentencePiece has no list of merges: of all neighbours whose concatenation is a piece, it joins those whose piece has the
highest score, the leftmost among equals (`bpe_model.cc`). `tokenizers` wants (left, right) pairs by rank, lowest first,
and also takes the leftmost among equal ranks. So ranking every way to split every piece by the score of the whole
gives the same result, as long as

- every character of a piece is a piece too (SentencePiece's trainer sees to that), and
- no two neighbouring candidates tie. Candidates tie where pieces have equal scores, or where one piece can be split in two
  ways that overlap ("ab" "a" "ba" for "aba"). The longer left part goes first then, which is the leftmost choice for
  runs of one character: the one case of ties in real vocabularies (Llama's runs of spaces).
"""

from __future__ import annotations

from collections.abc import Mapping


def merges_from_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Pairs (left, right) in the order in which they apply.

    `scores` holds the pieces that text may be joined to, in id order.
    """
    ranked: list[tuple[float, int, str, str]] = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                ranked.append((-score, -cut, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]
