"""Texts of prompts: exactly as long as their jobs say, equal where prefixes are, and the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, takewhile
from operator import eq

import pytest

from penstock.lab.prompts import WORDS, Tokenizer, cut, write_prompts
from penstock.lab.traces import estimate_tokens
from penstock.lab.workload import Job, Workload


class Words:
    """One token per word; but a rare word, of the words of `prompts`, takes three."""

    def __init__(self, rare: Sequence[str] = ()) -> None:
        self._rare = frozenset(rare)
        self._vocabulary: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        pieces = [
            piece for word in text.split() for piece in ([f"{word}/1", f"{word}/2", word] if word in self._rare else [word])
        ]
        self._vocabulary += [piece for piece in dict.fromkeys(pieces) if piece not in self._vocabulary]
        return [self._vocabulary.index(piece) for piece in pieces]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return " ".join(self._vocabulary[token_id] for token_id in token_ids)


class Characters:
    """One token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


class Joining(Words):
    """Some pairs of words become one token, as in a vocabulary with phrases."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return super().encode(text.replace("the a", "the_a"), add_special_tokens=add_special_tokens)


def workload(*jobs: Job, block_tokens: int = 0) -> Workload:
    return Workload(name="w", jobs=jobs, prefix_block_tokens=block_tokens)


def job(
    prompt: int, output: int = 5, *, after: int | None = None, prefix: tuple[int, ...] = (), text: str | None = None
) -> Job:
    return Job(arrival_ns=0, num_prompt_tokens=prompt, num_output_tokens=output, after=after, prefix=prefix, prompt=text)


def num_shared(one: Sequence[str], other: Sequence[str]) -> int:
    """Words with which both begin."""
    return sum(1 for _ in takewhile(bool, map(eq, one, other)))


def texts(written: Workload) -> list[str]:
    return [job.prompt or "" for job in written.jobs]


@pytest.mark.parametrize(
    "tokenizer", [Words(), Words(WORDS[::2]), Characters(), Joining()], ids=["words", "rare", "chars", "joined"]
)
@pytest.mark.parametrize("length", [1, 2, 7, 100, 1001])
def test_a_text_has_as_many_tokens_as_its_job_says(tokenizer: Tokenizer, length: int) -> None:
    written = write_prompts(workload(job(length), job(length)), tokenizer)
    for one in written.jobs:
        assert one.num_prompt_tokens == length == len(tokenizer.encode(one.prompt or "", add_special_tokens=False))
    assert written.name == "w", "as in a simulation, with which a result may be compared"


def test_without_a_tokenizer_lengths_are_estimated() -> None:
    written = write_prompts(workload(job(50), job(3, text="x" * 100), job(10, text="y" * 41)), None)
    assert [one.num_prompt_tokens for one in written.jobs] == [50, 3, 10]
    made_up, *own = texts(written)
    assert len(made_up.split()) == 50
    assert own == ["x" * 12, "y" * 41]
    assert written.name == "w"


def test_equal_blocks_have_equal_texts_and_other_prompts_share_none() -> None:
    made = workload(
        job(50, prefix=(1, 2, 3)), job(45, prefix=(1, 2, 4)), job(40, prefix=(5, 2)), job(40), job(40), block_tokens=16
    )
    for tokenizer in (Words(), None):
        words = [text.split() for text in texts(write_prompts(made, tokenizer))]
        shared = {pair: num_shared(words[pair[0]], words[pair[1]]) for pair in combinations(range(5), 2)}
        assert 32 <= shared.pop((0, 1)) < 36
        assert max(shared.values()) < 4


def test_a_last_block_that_is_not_full_is_the_begin_of_a_full_one() -> None:
    made = workload(job(24, prefix=(1, 2)), job(40, prefix=(1, 2, 3)), block_tokens=16)
    first, second = texts(write_prompts(made, Words()))
    assert second.startswith(first)


def test_a_text_of_the_trace_is_sent_as_it_is_unless_it_is_too_long() -> None:
    written = write_prompts(workload(job(5, text="a b c d e"), job(3, text="f g h i j"), job(9, text="k l")), Words())
    assert texts(written) == ["a b c d e", "f g h", "k l"]
    assert [one.num_prompt_tokens for one in written.jobs] == [5, 3, 2]


def test_a_text_of_the_trace_begins_with_words_of_the_seed_so_that_no_run_finds_it_cached() -> None:
    made = workload(job(6, text="a b c d e f"), job(6, text="a b c x y z"), job(20, after=0, text="g h"))
    first, second, third = (texts(write_prompts(made, Words(), seed=seed)) for seed in (0, 1, 2))
    assert first == ["a b c d e f", "a b c x y z", "g h"]
    assert not num_shared(second[0].split(), third[0].split())
    assert num_shared(second[0].split(), second[1].split()) == 7, "what the file's prompts share stays shared"
    assert [text.partition("a b c")[2] for text in second] == [" d e f", " x y z", ""]
    assert second[2] == "g h"
    assert [one.num_prompt_tokens for one in write_prompts(made, Words(), seed=1).jobs] == [10, 10, 10 + 5 + 2]
    [long] = write_prompts(workload(job(6, text="a b c d e f g")), Words(), seed=1).jobs
    assert (long.num_prompt_tokens, (long.prompt or "").split()[4:]) == (6, ["a", "b"]), "a limit stays one"


def test_a_turn_of_a_conversation_is_its_new_message_and_counts_all_before_it() -> None:
    made = workload(job(10, 5), job(22, 5, after=0), job(40, 5, after=1, text="x y z"))
    written = write_prompts(made, Words())
    assert [len(text.split()) for text in texts(written)] == [10, 7, 3]
    assert [one.num_prompt_tokens for one in written.jobs] == [10, 22, 30]


def test_shared_blocks_are_in_the_first_turn_alone() -> None:
    made = workload(job(20, prefix=(7,)), job(40, after=0, prefix=(7,)), block_tokens=16)
    first, second = texts(write_prompts(made, Words()))
    assert num_shared(first.split(), second.split()) < 4


def test_token_ids_of_a_job_stay_what_is_sent() -> None:
    own = Job(arrival_ns=0, num_prompt_tokens=2, num_output_tokens=1, prompt_token_ids=(4, 5))
    assert write_prompts(workload(own), Words()).jobs[0] is own


def test_the_seed_alone_decides() -> None:
    made = workload(job(30), job(30, prefix=(1,)), block_tokens=16)
    assert write_prompts(made, Words(), seed=1) == write_prompts(made, Words(), seed=1)
    assert all(
        one != other for one, other in zip(*(texts(write_prompts(made, None, seed=seed)) for seed in (1, 2)), strict=True)
    )


def test_cut_counts_the_text_and_not_the_tokens_it_was_cut_from() -> None:
    class Growing(Words):
        """Nine words and no more have a token at the end."""

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            ids = super().encode(text, add_special_tokens=add_special_tokens)
            return [*ids, 0] if len(ids) == 9 else ids

    tokenizer = Growing()
    ids = tokenizer.encode(" ".join(f"w{nth}" for nth in range(20)), add_special_tokens=False)
    text, count = cut(tokenizer, ids, 9)
    assert count == len(text.split()) == 8
    with pytest.raises(ValueError, match="make no text"):
        cut(tokenizer, [], 9)


def test_words_are_simple_and_all_different() -> None:
    assert len(WORDS) == len(set(WORDS)) > 400
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert estimate_tokens(" ".join(WORDS)) == pytest.approx(len(WORDS), rel=0.5)
