"""Builds a `Backend` from a GGUF file's vocabulary. Called by `load_tokenizer`; reads no files.

`tokenizer.ggml.model` names the kind: `gpt2` is byte-level BPE with the file's merges, `llama` is SentencePiece BPE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, processors

from penstock.text.backend import Backend
from penstock.text.merges import merges_from_scores
from penstock.text.pieces import SPACE_MARK, Spelling, byte_of_piece
from penstock.text.pretokenizers import make_normalizer, make_pre_tokenizer, recipe_for
from penstock.types.errors import ModelError
from penstock.types.vocab import GgufVocab

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""


def build_backend(vocab: GgufVocab) -> Backend:
    """Raises `ModelError` if the vocabulary is of another kind or contradicts itself."""
    check_vocab(vocab)
    is_byte_level = vocab.model == "gpt2"
    encoder = _byte_level_encoder(vocab) if is_byte_level else _sentencepiece_encoder(vocab)
    special = {*_ids_of_type(vocab, CONTROL), *_ids_of_type(vocab, UNKNOWN), *_end_ids(vocab)}
    user_defined = [token_id for token_id in _ids_of_type(vocab, USER_DEFINED) if token_id not in special]
    encoder.add_special_tokens(_added(vocab, sorted(special), special=True))
    encoder.add_tokens(_added(vocab, user_defined, special=False))
    _add_ends(encoder, vocab)
    return Backend(
        encoder=encoder,
        vocab_size=len(vocab.tokens),
        piece=_piece_lookup(encoder, vocab.tokens),
        spelling=Spelling.BYTE_LEVEL if is_byte_level else Spelling.SENTENCEPIECE,
        literal_ids=frozenset([*special, *user_defined]),
        special_ids=frozenset(special),
        silent_ids=frozenset(_ids_of_type(vocab, UNUSED)) - special,
        starts_with_space=not is_byte_level and vocab.add_space_prefix,
        bos_token_id=vocab.bos_token_id,
        eos_token_ids=() if vocab.eos_token_id is None else (vocab.eos_token_id,),
        unknown_token_id=vocab.unknown_token_id,
        padding_token_id=vocab.padding_token_id,
    )


def check_vocab(vocab: GgufVocab) -> None:
    """Raises `ModelError` for what can be refused before anything is built, so before weights are loaded."""
    if vocab.model not in ("gpt2", "llama"):
        raise ModelError(
            f"tokenizer.ggml.model is {vocab.model!r}; supported are 'gpt2' and 'llama'.",
            remedy="Use the model's Hugging Face directory, if it has a tokenizer.json.",
        )
    if vocab.model == "gpt2":
        recipe_for(vocab.pre)
    num_tokens = len(vocab.tokens)
    if num_tokens == 0:
        raise _contradiction("has no tokens")
    if len(vocab.token_types) not in (0, num_tokens):
        raise _contradiction(f"has {num_tokens} tokens but {len(vocab.token_types)} token types")
    needs_scores = vocab.model == "llama" and not vocab.merges
    if needs_scores and len(vocab.scores) != num_tokens:
        raise _contradiction(f"has {num_tokens} tokens but {len(vocab.scores)} scores")
    for name, token_id, is_needed in (
        ("bos", vocab.bos_token_id, vocab.add_bos_token),
        ("eos", vocab.eos_token_id, vocab.add_eos_token),
        ("unknown", vocab.unknown_token_id, False),
    ):
        if token_id is None and is_needed:
            raise _contradiction(f"asks for its {name} token in front of or behind a text, but names none")
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise _contradiction(f"has {num_tokens} tokens, and its {name} token is {token_id}")


def _contradiction(cause: str) -> ModelError:
    return ModelError(f"The vocabulary {cause}.", remedy="Fetch the file again; if it stays so, its converter is at fault.")


def _byte_level_encoder(vocab: GgufVocab) -> tokenizers.Tokenizer:
    recipe = recipe_for(vocab.pre)
    model = _bpe(vocab, _split_merges(vocab.merges), ignore_merges=recipe.ignore_merges)
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = make_pre_tokenizer(recipe)
    normalizer = make_normalizer(recipe)
    if normalizer is not None:
        encoder.normalizer = normalizer
    return encoder


def _sentencepiece_encoder(vocab: GgufVocab) -> tokenizers.Tokenizer:
    """Text is one long part: spaces become marks, and merging goes across them."""
    unknown = None if vocab.unknown_token_id is None else vocab.tokens[vocab.unknown_token_id]
    has_bytes = len({byte_of_piece(vocab.tokens[token_id]) for token_id in _ids_of_type(vocab, BYTE)} - {None}) == 256
    merges = _split_merges(vocab.merges) if vocab.merges else merges_from_scores(_joinable(vocab))
    encoder = tokenizers.Tokenizer(_bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
    encoder.normalizer = normalizers.Sequence(list(_sentencepiece_steps(vocab)))
    return encoder


def _sentencepiece_steps(vocab: GgufVocab) -> Iterator[normalizers.Normalizer]:
    """In SentencePiece's order (`normalizer.cc`). They run on each stretch of text between special tokens, so that a space goes
    before every one, as in llama.cpp and in transformers' `legacy` tokenizers."""
    if vocab.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(" {2,}"), " ")
        yield normalizers.Replace(Regex(r"\A | \z"), "")
    if vocab.add_space_prefix:
        yield normalizers.Prepend(SPACE_MARK)
    yield normalizers.Replace(" ", SPACE_MARK)


def _bpe(vocab: GgufVocab, merges: list[tuple[str, str]], **options: str | bool | None) -> models.BPE:
    ids = {token: token_id for token_id, token in enumerate(vocab.tokens)}
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise _contradiction(f"has merges that do not fit its tokens: {error}") from error


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    if any(not right for _, right in pairs):
        raise _contradiction("has a merge that does not consist of two pieces separated by a space")
    return pairs


def _joinable(vocab: GgufVocab) -> dict[str, float]:
    """Pieces that merging may give, with their scores: not control, byte or unused ones, which text never becomes."""
    if not vocab.token_types:
        return dict(zip(vocab.tokens, vocab.scores, strict=True))
    rows = zip(vocab.tokens, vocab.scores, vocab.token_types, strict=True)
    return {token: score for token, score, token_type in rows if token_type == NORMAL}


def _ids_of_type(vocab: GgufVocab, wanted: int) -> list[int]:
    return [token_id for token_id, token_type in enumerate(vocab.token_types) if token_type == wanted]


def _end_ids(vocab: GgufVocab) -> list[int]:
    """Files sometimes mark these as normal tokens; they are never text."""
    return [token_id for token_id in (vocab.bos_token_id, vocab.eos_token_id) if token_id is not None]


def _added(vocab: GgufVocab, ids: Iterable[int], *, special: bool) -> list[AddedToken]:
    return [AddedToken(vocab.tokens[token_id], normalized=False, special=special) for token_id in ids if vocab.tokens[token_id]]


def _add_ends(encoder: tokenizers.Tokenizer, vocab: GgufVocab) -> None:
    """What `add_special_tokens` adds. The template refers to the tokens by alias: their own text could be template syntax."""
    template, tokens = ["$A"], []
    if vocab.add_bos_token and vocab.bos_token_id is not None:
        template.insert(0, "bos")
        tokens.append({"id": "bos", "ids": [vocab.bos_token_id], "tokens": [vocab.tokens[vocab.bos_token_id]]})
    if vocab.add_eos_token and vocab.eos_token_id is not None:
        template.append("eos")
        tokens.append({"id": "eos", "ids": [vocab.eos_token_id], "tokens": [vocab.tokens[vocab.eos_token_id]]})
    if tokens:
        encoder.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)


def _piece_lookup(encoder: tokenizers.Tokenizer, tokens: Sequence[str]) -> Callable[[int], str | None]:
    """From the encoder, which has the pieces already (150,000 strings of ours take 25 MB), unless some are twice there: it has
    one id of each then."""
    num_tokens = len(tokens)
    find: Callable[[int], str | None] = encoder.id_to_token if encoder.get_vocab_size() == num_tokens else tokens.__getitem__

    def piece(token_id: int) -> str | None:
        return find(token_id) if 0 <= token_id < num_tokens else None

    return piece
