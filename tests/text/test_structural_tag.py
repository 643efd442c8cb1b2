"""Structural tags, against Python's regular expressions: what may come is what the format says, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from random import Random

import pytest

from penstock.text.answer_matcher import AnswerPlan
from penstock.text.grammar import MAX_SOURCE_CHARS, Grammar, GrammarKind, Lead
from penstock.text.structural_tag import of_structural_tag
from penstock.types.errors import GrammarFailure, Rejected
from support.answering import ALL, END_ID, PLAIN, REASONING, SPECIAL, allowed, say, wander

X = {"enum": ["q", 7]}
STRUCTURES = [{"begin": "<f=x>", "schema": X, "end": "</f>"}, {"begin": "<f=y>", "schema": {"const": True}, "end": "</f>"}]
LEGACY = {"type": "structural_tag", "structures": STRUCTURES, "triggers": ["<f="]}
IS_X, IS_Y = r'<f=x>("q"|7)</f>', "<f=y>true</f>"


def const(value):
    return {"type": "const_string", "value": value}


def regex(pattern):
    return {"type": "regex", "pattern": pattern}


def by_schema(schema):
    return {"type": "json_schema", "json_schema": schema}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers, *tags, **fields):
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **fields}


ANY_TEXT = {"type": "any_text"}
TAG_X, TAG_Y = tag("<f=x>", by_schema(X), "</f>"), tag("<f=y>", by_schema({"const": True}), "</f>")
LETTERS = tag("[a]", regex("[ab<]*"), "</a>")
THINK = tag("<think>", ANY_TEXT, "</think>")


def free(*triggers):
    """Any text without a trigger."""
    return f"(?:(?!{'|'.join(map(re.escape, triggers))})[\\s\\S])*"


def around(tags, *triggers):
    """Tags in text that is free otherwise."""
    return f"(?:{free(*triggers)}(?:{tags}))*{free(*triggers)}"


FORMATS = {
    "legacy": (LEGACY, around(f"{IS_X}|{IS_Y}", "<f=")),
    "triggers": (triggered(["<f="], TAG_X, TAG_Y), around(f"{IS_X}|{IS_Y}", "<f=")),
    "a trigger that is all of a begin": (triggered(["<f=x>", "<f=y"], TAG_X, TAG_Y), around(f"{IS_X}|{IS_Y}", "<f=x>", "<f=y")),
    "two triggers": (triggered(["<f", "[a"], TAG_X, LETTERS), around(f"{IS_X}|\\[a\\][ab<]*?</a>", "<f", "[a")),
    "at least one": (
        triggered(["<f="], TAG_X, TAG_Y, at_least_one=True),
        f"(?:{IS_X}|{IS_Y}){around(f'{IS_X}|{IS_Y}', '<f=')}",
    ),
    "the first only": (triggered(["<f="], TAG_X, stop_after_first=True), f"{free('<f=')}(?:{IS_X})?"),
    "exactly one": (triggered(["<f="], TAG_X, TAG_Y, at_least_one=True, stop_after_first=True), f"{IS_X}|{IS_Y}"),
    "free text in a tag": (
        triggered(["<f=", "<think>"], TAG_X, THINK),
        around(f"{IS_X}|<think>[\\s\\S]*?</think>", "<f=", "<think>"),
    ),
    "thoughts first": (
        {"type": "sequence", "elements": [THINK, triggered(["<f="], TAG_X)]},
        f"<think>(?:(?!</think>)[\\s\\S])*</think>{around(IS_X, '<f=')}",
    ),
    "tags with a separator": (
        {"type": "tags_with_separator", "tags": [TAG_X, TAG_Y], "separator": ", "},
        f"(?:(?:{IS_X}|{IS_Y})(?:, (?:{IS_X}|{IS_Y}))*)?",
    ),
    "two ends": (tag("<f=x>", by_schema(X), ["</f>", "<f=y>"]), r'<f=x>("q"|7)(</f>|<f=y>)'),
    "texts": (
        {
            "type": "sequence",
            "elements": [
                const("a"),
                {"type": "or", "elements": [const("b"), regex("[ab]<")]},
                {"type": "optional", "content": const("a")},
            ],
        },
        "a(b|[ab]<)a?",
    ),
    "repeated": (
        {
            "type": "sequence",
            "elements": [
                {"type": "star", "content": const("ab")},
                {"type": "repeat", "min": 1, "max": 2, "content": regex("[a<]")},
            ],
        },
        "(ab)*[a<]{1,2}",
    ),
    "JSON between texts": (
        {"type": "sequence", "elements": [const("a"), by_schema(X), const("<"), by_schema({"const": True})]},
        r'a("q"|7)<true',
    ),
    "a regex alone": (regex("[ab]*<a"), "[ab]*<a"),
    "free text": (ANY_TEXT, r"[\s\S]*"),
}
PIECES = [
    "<f=",
    "x>",
    "y>",
    "z>",
    '"q"',
    "7",
    "[]",
    "</f>",
    "<",
    "</think>",
    "<think>",
    "a",
    "b",
    "[a]",
    "</a>",
    ", ",
    "\n",
    "</",
    "f",
]


def asked(one):
    whole = one if one.get("type") == "structural_tag" else {"type": "structural_tag", "format": one}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(whole))


def is_answer(grammar, tokenizer, text):
    """May this be the whole answer?"""
    matcher = ALL[id(tokenizer)].matcher(grammar)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id not in allowed(matcher, tokenizer):
            return False
        matcher.accept((token_id,))
    return END_ID in allowed(matcher, tokenizer)


def texts_of(pattern, random):
    """By chance, and with a chance of tags that are right."""
    tags = [*PIECES, '<f=x>"q"</f>', "<f=x>7</f>", "<f=y>true</f>", "[a]ab</a>", "<think>a<f=</think>"]
    return ["".join(random.choices(random.choice([PIECES, tags]), k=random.randrange(7))) for _ in range(40)]


@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_is_taken_if_and_only_if_it_follows_the_format(name, tokenizer):
    one, pattern = FORMATS[name]
    grammar = asked(one)
    told = {text: is_answer(grammar, tokenizer, text) for text in texts_of(pattern, Random(name))}
    assert told == {text: re.fullmatch(pattern, text) is not None for text in told}


@pytest.mark.parametrize("name", [name for name in FORMATS if "free text" not in name and "thoughts" not in name])
def test_answers_by_chance_follow_the_format(name):
    one, pattern = FORMATS[name]
    for seed in range(5):
        assert re.fullmatch(pattern, wander(ALL[id(PLAIN)].matcher(asked(one)), PLAIN, Random(seed)))


def test_marks_may_be_special_tokens():
    marks = ("<|start|>", "<|end|>", "[THINK]", "[/THINK]")
    start, end, think, no_think = [SPECIAL.encode(mark, add_special_tokens=False)[0] for mark in marks]
    grammar = asked(
        triggered(["<|start|>", "[THINK]"], tag("<|start|>x", by_schema(X), "<|end|>"), tag("[THINK]", ANY_TEXT, "[/THINK]"))
    )
    matcher = ALL[id(SPECIAL)].matcher(grammar)

    def say(*told):
        for one in told:
            for token_id in SPECIAL.encode(one, add_special_tokens=False) if isinstance(one, str) else [one]:
                assert token_id in allowed(matcher, SPECIAL)
                matcher.accept((token_id,))

    say("a <", start)
    assert end not in allowed(matcher, SPECIAL)
    assert END_ID not in allowed(matcher, SPECIAL)
    say('x"q"', end, "b", think, "c", no_think)
    assert {start, think, END_ID} <= allowed(matcher, SPECIAL)
    assert end not in allowed(matcher, SPECIAL)


@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("name", ["think", "seed_oss", "gemma4", "mistral"])
def test_a_reasoning_block_stands_before_the_format(name, tokenizer):
    form = REASONING[name]
    block = f"{form.open}so <f=z {form.close}{form.separator}"
    answers = {LEGACY["type"]: "a <f=x>7</f> b", "triggered_tags": "<f=x>7</f>"}
    for one in (LEGACY, triggered(["<f="], TAG_X, at_least_one=True)):
        grammar = replace(asked(one), lead=Lead(form.open, form.close, form.lead, form.separator))
        for text in (block, ""):
            matcher = ALL[id(tokenizer)].matcher(grammar, AnswerPlan(reasoning=form))
            say(matcher, tokenizer, text + answers[one["type"]])
            assert END_ID in allowed(matcher, tokenizer)


REFUSED = {
    "another type": ({"type": "text"}, "must be an object of the type structural_tag"),
    "nothing": ({"type": "structural_tag"}, "'structures' and 'triggers', or 'format'"),
    "both forms": ({**LEGACY, "format": ANY_TEXT}, "'structures' and 'triggers', or 'format'"),
    "no trigger": ({**LEGACY, "triggers": []}, "at format.triggers, must be a list with 1 to 128"),
    "another trigger": ({**LEGACY, "triggers": ["<g"]}, "at format.tags[0].begin, begins with none of the triggers"),
    "an idle trigger": ({**LEGACY, "triggers": ["<f", "<g"]}, "at format.triggers[1], begins none of the tags"),
    "a trigger in another": ({**LEGACY, "triggers": ["<f", "f="]}, None),
    "a begin twice": ({**LEGACY, "structures": STRUCTURES[:1] * 2}, "begins with that of"),
    "an unknown format": ({"type": "token", "token": 3}, "has the type 'token', and supported are const_string"),
    "an unknown field": (const("a") | {"min": 3}, "has the field 'min'"),
    "a missing field": ({"type": "regex"}, "needs 'pattern'"),
    "XML": (by_schema(X) | {"style": "qwen_xml"}, 'at format.style, supports only "json"'),
    "a limit of free text": (ANY_TEXT | {"max_tokens": 3}, "at format.max_tokens, supports only null"),
    "a number before a digit": (tag("a", by_schema(X), "3"), "could continue a number"),
    "JSON before a regex": ({"type": "sequence", "elements": [by_schema(X), regex("a")]}, "followed by a constant text"),
    "a regex before JSON": ({"type": "sequence", "elements": [regex("a*"), by_schema(X)]}, "follows a regex"),
    "free text before JSON": ({"type": "sequence", "elements": [ANY_TEXT, by_schema(X)]}, "followed by a constant text"),
    "JSON in a choice": ({"type": "or", "elements": [by_schema(X), const("a")]}, "must be made of texts and regexes here"),
    "tags before a text": (
        {"type": "sequence", "elements": [triggered(["<f"], TAG_X), const("a")]},
        "has no fixed end, so nothing can follow it",
    ),
    "a schema that can't be followed": (by_schema({"not": {}}), "does not support 'not'"),
    "a bad regex": (regex("(?=a)"), "A regex has look-around"),
    "a bad number": ({"type": "repeat", "min": 3, "max": 2, "content": const("a")}, "'min' and 'max' in order"),
    "an end in another": (tag("a", const("b"), ["c", "cd"]), "the beginning of another end"),
    "structures that are no list": ({**LEGACY, "structures": STRUCTURES[0]}, "at structures, must be a list"),
    "a structure without an end": ({**LEGACY, "structures": [{"begin": "<f=x>", "schema": X}]}, "at structures[0], must have"),
    "a text as a schema": (by_schema("X"), "at format.json_schema, must be a JSON schema, an object"),
    "a format without a type": ({"type": "optional", "content": "a"}, "at format.content, must be an object with a type"),
    "a number that is a text": ({"type": "repeat", "min": "1", "max": 2, "content": const("a")}, "needs integers"),
    "a text among tags": (triggered(["<f="], const("<f=")), "at format.tags[0], must be a tag"),
    "a text for true": (triggered(["<f="], TAG_X, at_least_one="yes"), "at format.at_least_one, must be true or false"),
    "an empty text": (const(""), "at format.value, must be a text that is not empty"),
}
SPECIAL_REFUSED = {
    "several ends": (tag("a", const("b"), ["<|start|>", "c"]), "at format, has several texts, and a special token"),
    "beside a regex": (
        {"type": "sequence", "elements": [const("<|start|>"), regex("a")]},
        "The structural_tag has a special token",
    ),
    "a trigger with more": (
        triggered(["<|start|>a"], tag("<|start|>ab", const("c"), "d")),
        "at format.triggers[0], has a special token",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_followed_is_refused_by_name(name):
    one, says = REFUSED[name]
    if says is None:
        one, says = triggered(["<f", "x<f"], TAG_X, tag("x<f", const("b"), "c")), "has '<f' inside another one"
    is_whole = one.get("type") in ("structural_tag", "text")
    source = json.dumps(one if is_whole else {"type": "structural_tag", "format": one})
    with pytest.raises(Rejected, match=re.escape(says)):
        ALL[id(PLAIN)].matcher(Grammar(GrammarKind.STRUCTURAL_TAG, source))


@pytest.mark.parametrize("name", SPECIAL_REFUSED)
def test_special_tokens_that_can_not_be_followed_are_refused_by_name(name):
    one, says = SPECIAL_REFUSED[name]
    ALL[id(PLAIN)].matcher(asked(one))
    with pytest.raises(Rejected, match=re.escape(says)):
        ALL[id(SPECIAL)].matcher(asked(one))


def test_deep_formats_are_refused_and_what_is_no_json():
    deep = const("a")
    for _ in range(50):
        deep = {"type": "optional", "content": deep}
    with pytest.raises(Rejected, match="inside more than 32 others"):
        ALL[id(PLAIN)].matcher(asked(deep))
    with pytest.raises(Rejected, match="is not JSON"):
        ALL[id(PLAIN)].matcher(Grammar(GrammarKind.STRUCTURAL_TAG, "{"))


def test_a_row_may_have_a_thousand_parts():
    free = [{"type": "any_text"}, {"type": "const_string", "value": "a"}] * 60
    rows = [{"type": "sequence", "elements": free}] * 18
    source = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": rows}}, separators=(",", ":"))
    assert len(source) < MAX_SOURCE_CHARS
    assert of_structural_tag(source, json.dumps, 0).count("[lazy]") == 60 * 18


def test_regexes_are_bounded_together():
    many = {"type": "sequence", "elements": [regex("a" * 3000) for _ in range(3)]}
    with pytest.raises(Rejected, match=r"elements\[2\]\.pattern, brings the regexes to more than 8192 characters"):
        ALL[id(PLAIN)].matcher(asked(many))


def test_a_token_that_leaves_the_tag_fails():
    matcher = ALL[id(PLAIN)].matcher(asked(LEGACY))
    matcher.accept(PLAIN.encode("<f=", add_special_tokens=False))
    with pytest.raises(GrammarFailure):
        matcher.accept(PLAIN.encode("z", add_special_tokens=False))
