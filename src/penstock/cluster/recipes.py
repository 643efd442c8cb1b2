"""Grammars at the front, which compiles them only to check them. The replica compiles them again and follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from penstock.text.answer_matcher import AnswerPlan
from penstock.text.grammar import Grammar, Grammars, num_at_once
from penstock.types.sampling import Matcher


@dataclass(frozen=True, slots=True)
class Recipe:
    """The arguments for making a matcher. It is the `Request.matcher` at the front; the replica makes the real one from it."""

    grammar: Grammar | None
    plan: AnswerPlan | None

    def _elsewhere(self, *_: object) -> NoReturn:
        raise AssertionError("the matcher is at the replica")

    accept = copy = forced = mask = _elsewhere


class RecipeBook(Grammars):
    """A `Grammars` that returns recipes instead of matchers. It refuses the same grammars."""

    def matcher(self, grammar: Grammar, plan: AnswerPlan | None = None) -> Matcher:
        self.ready(grammar)
        return Recipe(grammar, plan)

    def free_matcher(self, plan: AnswerPlan) -> Matcher:
        return Recipe(None, plan)

    def known(self, grammar: Grammar, plan: AnswerPlan | None = None, number: int = 1) -> list[Matcher] | None:
        if self.find(grammar, num_at_once(plan, number)) is None:
            return None
        return [Recipe(grammar, plan) for _ in range(number)]
