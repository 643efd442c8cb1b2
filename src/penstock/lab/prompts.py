"""Writes the text of each prompt: the text in the trace, if any, else random common words.

With a tokenizer, a text has the number of tokens that its job asks for, or the job is changed to match. Without one, lengths
are estimated. Equal blocks of a prefix get equal texts; other prompts share no block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

from penstock.lab.traces import CHARS_PER_TOKEN, CountTokens, estimate_tokens
from penstock.lab.workload import Job, Workload

WORDS = (  # noqa: SIM905  # a list of 500 literals is no easier to read
    "about above across after again air all also always and animal answer any apple arm around ask away back ball "
    "bank be bear bed before begin behind best better between big bird black blue boat body book both box boy bread "
    "bring brother brown build but buy by call came can car care carry cat change child city class clean clear close "
    "cloud cold come cook corner could country cross cut dark day dear deep did dinner do doctor dog done door down "
    "draw dream dress drink drive dry each ear early earth east easy eat egg eight end even ever every eye face fact "
    "fall family far farm fast father feel feet few field find fine fire first fish five floor fly food foot for "
    "forest form four free fresh friend from front fruit full game garden gave get girl give glass go gold good got "
    "grass great green ground group grow had hair half hand happy hard has hat have he head hear heart heat heavy "
    "help her here high hill him his hold home hope horse hot hour house how hundred ice if in inside into iron "
    "island it job just keep kind king knew know lake land large last late laugh law lead learn leave left leg less "
    "let letter life light like line list little live long look lost lot love low made main make man many map mark "
    "market may me mean men might mile milk mind mine money month moon more morning most mother mountain mouth move "
    "much music must my name near neck need never new next nice night nine no noise north not note now number of off "
    "office often oil old on once one only open or orange order other our out over own page paint paper part party "
    "pass past pay people person picture piece place plan plane plant play point poor power press price put queen "
    "quick quiet rain ran reach read ready real red rest rich ride right ring river road rock roll room round rule "
    "run safe said sail same sand saw say school sea seat second see seed sell send set seven shall shape she ship "
    "shoe shop short should show side sign silver sing sister sit six size skin sky sleep slow small smile snow so "
    "soft some son song soon sound south space speak spring square stand star start state stay step still stone stop "
    "store story street strong such sugar summer sun sure table take talk tall teach tell ten test than that the "
    "their them then there they thing think this thought three through time to today together told too took top town "
    "train travel tree true try turn two under until up us use valley very view village visit voice wait walk wall "
    "want war warm was wash watch water way we wear week well went were west what wheel when where which white who "
    "why wide wife wild will wind window winter wish with woman wood word work world would write year yellow yes yet "
    "you young your"
).split()
"""Common words. Most are a single token in most vocabularies."""
_ANCHOR = "the"


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


def counter_of(tokenizer: Tokenizer) -> CountTokens:
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def write_prompts(workload: Workload, tokenizer: Tokenizer | None, *, seed: int = 0) -> Workload:
    """Return the workload with a text for each job, except jobs with token ids. The same arguments give the same texts.

    A later turn of a conversation gets the text of its new message only. Tokens of a chat template do not count.
    """
    writer = _Writer(tokenizer, workload.prefix_block_tokens, seed=seed)
    jobs: list[Job] = []
    for idx, job in enumerate(workload.jobs):
        if job.prompt_token_ids:
            jobs.append(job)
            continue
        history = was_history = 0
        if job.after is not None:
            before, old = jobs[job.after], workload.jobs[job.after]
            history, was_history = (one.num_prompt_tokens + one.num_output_tokens for one in (before, old))
        num_new_tokens = max(1, job.num_prompt_tokens - was_history)
        text, count = writer.write(job, idx, num_new_tokens)
        jobs.append(replace(job, prompt=text, num_prompt_tokens=history + count))
    return replace(workload, jobs=jobs)


class _Writer:
    def __init__(self, tokenizer: Tokenizer | None, prefix_block_tokens: int, *, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._prefix_block_tokens = prefix_block_tokens
        self._seed = seed
        self._words, self._tokens_per_word = _cheapest_words(tokenizer) if tokenizer else (WORDS, 1)
        # A prefix cache with the texts of other seeds must not have these. Seed 0 sends a file's texts as they are.
        self._opening = "".join(f"{word} " for word in self._draw("opening", 4)) if seed else ""

    def write(self, job: Job, idx: int, num_tokens: int) -> tuple[str, int]:
        """Return a text for a job, and its number of tokens.

        The job's own text is cut to at most `num_tokens`; words of the seed before it make a whole one longer. A random text
        has `num_tokens`, or a few less if tries fail.
        """
        if job.prompt is not None:
            text, count = self._shortened(job.prompt, num_tokens)
            if not self._opening or job.after is not None:
                return text, count
            num_more = len(self._opening) if text == job.prompt else 0  # a token has at least one character
            return self._shortened(self._opening + text, num_tokens + num_more)
        # In a later turn, the shared blocks are part of the history.
        blocks = job.prefix if job.after is None else ()
        words: list[str] = []
        num_left = num_tokens
        for block in blocks:
            taken = min(num_left, self._prefix_block_tokens)
            words += self._draw(f"block {block}", taken)
            num_left -= taken
        if num_left:
            words += self._draw(f"job {idx}", num_left)
        return self._exact(words, idx, num_tokens)

    def _draw(self, purpose: str, num_tokens: int) -> list[str]:
        rng = Random(f"{self._seed} {purpose}")  # noqa: S311  # repeatable on purpose
        return rng.choices(self._words, k=max(1, num_tokens // self._tokens_per_word))

    def _exact(self, words: list[str], idx: int, num_tokens: int) -> tuple[str, int]:
        text = " ".join(words)
        if self._tokenizer is None:
            return text, num_tokens
        count = len(self._ids(text))
        more = Random(f"{self._seed} more {idx}")  # noqa: S311  # repeatable on purpose
        for _ in range(8):
            if count == num_tokens:
                return text, count
            num_words = (num_tokens - count) // self._tokens_per_word
            words = (
                words + more.choices(self._words, k=max(1, num_words)) if count < num_tokens else words[: min(num_words, -1)]
            )
            text = " ".join(words)
            count = len(self._ids(text))
        if count < num_tokens:
            text = " ".join([*words, *more.choices(self._words, k=num_tokens - count)])
        return cut(self._tokenizer, self._ids(text), num_tokens)

    def _shortened(self, text: str, max_tokens: int) -> tuple[str, int]:
        if self._tokenizer is None:
            count = estimate_tokens(text)
            return (text, count) if count <= max_tokens else (text[: max_tokens * CHARS_PER_TOKEN], max_tokens)
        ids = self._ids(text)
        return (text, len(ids)) if len(ids) <= max_tokens else cut(self._tokenizer, ids, max_tokens)

    def _ids(self, text: str) -> list[int]:
        assert self._tokenizer is not None, "only called with a tokenizer"
        return self._tokenizer.encode(text, add_special_tokens=False)


def cut(tokenizer: Tokenizer, token_ids: Sequence[int], max_tokens: int) -> tuple[str, int]:
    """Decode at most `max_tokens` of the tokens. Return the text and its number of tokens.

    Text cut inside a word or a character may encode to other tokens, so the text is encoded again to count. Raises ValueError
    if the tokens make no text.
    """
    for num_tokens in range(min(max_tokens, len(token_ids)), 0, -1):
        text = tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=False).rstrip("\ufffd")
        count = counter_of(tokenizer)(text)
        if 0 < count <= max_tokens:
            return text, count
    raise ValueError("these tokens make no text")


def _cheapest_words(tokenizer: Tokenizer) -> tuple[list[str], int]:
    num_tokens = counter_of(tokenizer)
    anchor = num_tokens(_ANCHOR)
    costs = {word: max(1, num_tokens(f"{_ANCHOR} {word}") - anchor, num_tokens(word)) for word in WORDS}
    least = min(costs.values())
    return [word for word, cost in costs.items() if cost == least], least
