"""Grammars of a front: they are compiled there to be checked, and followed at the replica, which compiles them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from penstock.text.answer_matcher import AnswerPlan
from penstock.text.grammar import Grammar, Grammars, num_at_once
from penstock.types.sampling import Matcher


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make the matcher of an answer. It stands for the matcher in a request that is computed elsewhere."""

    grammar: Grammar | None
    plan: AnswerPlan | None

    def _elsewhere(self, *_: object) -> NoReturn:
        raise AssertionError("the matcher is at the replica")

    accept = copy = forced = mask = _elsewhere


class RecipeBook(Grammars):
    """Gives recipes where `Grammars` gives matchers. Grammars are refused by the same rules."""

    def matcher(self, grammar: Grammar, plan: AnswerPlan | None = None) -> Matcher:
        self.ready(grammar)
        return Recipe(grammar, plan)

    def free_matcher(self, plan: AnswerPlan) -> Matcher:
        return Recipe(None, plan)

    def known(self, grammar: Grammar, plan: AnswerPlan | None = None, number: int = 1) -> list[Matcher] | None:
        if self.find(grammar, num_at_once(plan, number)) is None:
            return None
        return [Recipe(grammar, plan) for _ in range(number)]
