"""The facts of models' files, for answers that describe a model whether it is loaded or not: Ollama's and llama.cpp's."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from penstock.deploy.served import ModelCard, ServedModel


class ModelCards:
    """Reads each model's files once, from the first question on. A disk that hangs keeps one thread for each model."""

    def __init__(self) -> None:
        self._cards: WeakKeyDictionary[ServedModel, asyncio.Future[ModelCard]] = WeakKeyDictionary()

    async def of(self, served: ServedModel) -> ModelCard:
        """Return the facts of a model's files. Waits for the disk."""
        if served not in self._cards:
            self._cards[served] = asyncio.ensure_future(asyncio.to_thread(served.card))
        return await asyncio.shield(self._cards[served])
