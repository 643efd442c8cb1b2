"""Ensembles: several models answer one question, and one of the answers is chosen.

All answers are held back until they are complete, so a stream delivers its answer all at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from penstock.calls.call import Call, Conversation
from penstock.config.routes import EnsembleConfig
from penstock.routes.agreement import majority, normalised
from penstock.serve.trials import Odds, conversation_of
from penstock.text.dialects import Message

_JUDGE = """{answers}

Which of these answers to the above is best? Reply with its number alone."""
Score = Callable[[Sequence[str]], Awaitable[Sequence[float]]]
"""Takes answers, and returns how well each of them answers the question."""


@dataclass(frozen=True, slots=True)
class Ensemble:
    config: EnsembleConfig
    models: tuple[str, ...]
    """Names of the models that this request may use."""
    odds: Odds
    """Rates answers with the judge model."""
    score: Score
    """Rates answers with the reranker."""

    async def choose(self, call: Call, texts: Sequence[str]) -> tuple[int, str]:
        """Return the index of the chosen answer to a call, and why. Raises `ModelAway`, `ApiError` and `Rejected`."""
        if len(texts) == 1:
            return 0, "alone"
        if self.config.judge is not None and (conversation := conversation_of(call)) is not None:
            odds = await self.odds(call, _with_answers(conversation, texts), [str(number + 1) for number in range(len(texts))])
            best = max(range(len(texts)), key=odds.__getitem__)
            return best, f"judged={','.join([f'{one:.3f}' for one in odds])}"
        if self.config.reranker is not None:
            scores = await self.score(texts)
            best = max(range(len(texts)), key=scores.__getitem__)
            return best, f"score={scores[best]:.3f}"
        best, count = majority([normalised(text, self.config.part) for text in texts])
        return best, f"votes={count} of {len(texts)}"


def _with_answers(conversation: Conversation, texts: Sequence[str]) -> Conversation:
    """Put the judge's question behind the last message of the user: not all templates take two in a row."""
    answers = "\n\n".join([f"[{number}] {text}" for number, text in enumerate(texts, 1)])
    *before, last = conversation.messages
    asked = Message(role="user", content=_JUDGE.format(answers=answers))
    if last.role == "user":
        return replace(conversation, messages=[*before, replace(last, content=f"{last.content}\n\n{asked.content}")])
    return replace(conversation, messages=[*before, last, asked])
