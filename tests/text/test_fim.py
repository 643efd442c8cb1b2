"""Prompts that ask for a middle, by the names of a model's tokens."""

import pytest

from penstock.text.fim import ENDS, FILES, NAMES, REPOSITORIES, find_fim
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.text.vocabulary import byte_level_alphabet
from penstock.types.vocab import GgufVocab


def make_tokenizer(special: tuple[str, ...]) -> Tokenizer:
    """Single bytes, and these tokens before them."""
    vocab = GgufVocab(
        model="gpt2",
        pre="gpt-2",
        tokens=[*special, *byte_level_alphabet()],
        token_types=[3] * len(special) + [1] * 256,
        merges=[],
        scores=[],
        bos_token_id=None,
        eos_token_id=0,
        unknown_token_id=None,
        add_bos_token=False,
        add_eos_token=False,
        add_space_prefix=False,
    )
    return load_tokenizer(vocab)


@pytest.mark.parametrize("names", NAMES)
def test_a_model_s_tokens_are_found_by_their_names(names: tuple[str, str, str]) -> None:
    tokenizer = make_tokenizer(("<|end|>", *names, ENDS[0]))
    fim = find_fim(tokenizer)
    assert fim is not None
    assert (fim.before, fim.behind, fim.middle) == names
    assert fim.end_token_ids == (4,)
    first, last = tokenizer.encode("ab", add_special_tokens=False), tokenizer.encode("c", add_special_tokens=False)
    token_ids = tokenizer.encode(fim.text("ab", "c"), add_special_tokens=True)
    assert token_ids == [1, *first, 2, *last, 3]
    assert fim.token_ids(first, "c", tokenizer) == token_ids


@pytest.mark.parametrize(
    "special", [("<|end|>",), ("<|end|>", *NAMES[0][:2]), ("<|end|>", NAMES[0][0], NAMES[1][1], NAMES[1][2])]
)
def test_another_model_has_none(special: tuple[str, ...]) -> None:
    assert find_fim(make_tokenizer(special)) is None


@pytest.mark.parametrize(
    ("special", "text"),
    [
        ((), "A\n\nB\n\n{hole}"),
        ((FILES[0],), "<|file_sep|>a.py\nA<|file_sep|>b.py\nB<|file_sep|>file\n{hole}"),
        (
            (REPOSITORIES[0], FILES[0]),
            "<|repo_name|>repository\n<|file_sep|>a.py\nA<|file_sep|>b.py\nB<|file_sep|>file\n{hole}",
        ),
    ],
)
def test_other_files_stand_before_the_hole_as_the_model_has_learned(special: tuple[str, ...], text: str) -> None:
    fim = find_fim(make_tokenizer((*NAMES[0], *special)))
    assert fim is not None
    files = [fim.file_text("a.py", "A"), fim.file_text("b.py", "B")]
    assert fim.text_after_files(files, "x", "y") == text.format(hole=fim.text("x", "y"))
    assert fim.text_after_files([], "x", "y") == fim.text("x", "y")
