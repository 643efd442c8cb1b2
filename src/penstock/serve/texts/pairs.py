"""Scores pairs of texts: with a reranker, or by the cosines of an embedding model's vectors.

Used by all APIs that rank or score, and by `LLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

from penstock.serve.texts.call import TextResult, TextsCall, Truncation
from penstock.serve.texts.numbers import cosine, embedding, max_similarity, scores, unit_rows
from penstock.serve.texts.read import DOCUMENT_PROMPTS, QUERY_PROMPTS, Opened, prompt_for, require_scores
from penstock.types.encoder import EncoderInfo, ScoreFunction, Task


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of texts. Pair i is `firsts[i]` and `seconds[i]`. A single text in `firsts` is used for all pairs."""

    firsts: Sequence[str]
    seconds: Sequence[str]
    first_name: Callable[[int], str]
    """Returns the field of a text in the body, for error messages."""
    second_name: Callable[[int], str]

    def call(self, opened: Opened, truncation: Truncation | None, *, is_search: bool) -> TextsCall:
        """Return the call that computes the scores. `is_search`: see `texts`. Raises 400 if the model has no scores."""
        require_scores(opened)
        texts = self.texts(opened.encoder, is_search=is_search)
        if opened.encoder.task is Task.RERANK:
            return opened.call(texts, self.second_name, truncation, first_name_of=self.first_name)
        return opened.call(texts, self._name, truncation, has_vectors=False)

    def texts(self, encoder: EncoderInfo, *, is_search: bool = False) -> Sequence[str | tuple[str, str]]:
        """Return the texts that the model reads: pairs for a reranker, otherwise the firsts followed by the seconds.

        A reranker's default prompt is put before the first text of each pair. For other models, `is_search` adds the prompts of
        questions to the firsts, and those of documents to the seconds. A model with vectors of tokens always gets them.
        """
        if encoder.task is Task.RERANK:
            prompt = prompt_for(encoder)
            firsts = cycle([prompt + text for text in self.firsts])  # a single one is not copied for each pair
            return list(zip(firsts, self.seconds, strict=False))
        query, document = (QUERY_PROMPTS, DOCUMENT_PROMPTS) if is_search or encoder.is_per_token else ((), ())
        first_prompt, second_prompt = prompt_for(encoder, *query), prompt_for(encoder, *document)
        return [first_prompt + text for text in self.firsts] + [second_prompt + text for text in self.seconds]

    def scores(self, encoder: EncoderInfo, results: Sequence[TextResult], *, is_raw: bool = False) -> list[float]:
        """Return a score for each pair from the results of `texts`.

        A reranker's score is its output after the model's activation function, or before it with `is_raw`.
        """
        if encoder.task is Task.RERANK:
            function = ScoreFunction.NONE if is_raw else encoder.scores
            return [scores(result, function)[0] for result in results]
        read, compare = (unit_rows, max_similarity) if encoder.is_per_token else (embedding, cosine)
        if encoder.is_sparse:
            read = partial(embedding, is_unit=False)  # SPLADE's similarity is the product
        vectors = [read(result, encoder) for result in results]
        firsts, seconds = vectors[: len(self.firsts)], vectors[len(self.firsts) :]
        return [compare(firsts[0 if len(firsts) == 1 else index], second) for index, second in enumerate(seconds)]

    def _name(self, index: int) -> str:
        num_firsts = len(self.firsts)
        return self.first_name(index) if index < num_firsts else self.second_name(index - num_firsts)
