"""Helpers that `server/test_openai_client.py` shares with other tests."""

from typing import Literal

from pydantic import BaseModel


class Answer(BaseModel):
    colour: Literal["red", "green"]
    sizes: list[Literal[1, 2, 3]]
