"""Grammars in GBNF: answers as their rules have them, read in any way there is, and errors with their places."""

import re
from itertools import pairwise

import pytest

from penstock.text import gbnf
from penstock.text.grammar import MAX_LARK_CHARS, Grammar, GrammarKind
from penstock.types.errors import Rejected
from support.schemas.bytewise import Bytewise
from support.work_time import thread_s

BYTES = Bytewise()
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
    string ":" ws value   # a pair
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (expr "=" term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("source", "answers", "others"),
    [
        (JSON, ['{"a": [1, 2.5e3, {"b":null}], "c\\n":"é"}', "{}"], ["[]", '{"a" 1}', '{"a":tru}']),
        (SUMS, ["a=b\n", "(a*(b -2)) =4\n\n", "a=b\nc=1\n"], ["a=b", "a b=1\n"]),
        ('root ::= [^-a\\]] "é" [\\-x] [a-] .', ["béx-\n", "zé-a東"], ["-éxaa", "]éx-a", "béxbx"]),
        ('root ::= root "ab" | "x"', ["x", "xabab"], ["", "xa"]),
        ('root ::= [a-z] root | "abc" "!"', ["abc!", "ababc!", "abdabc!"], ["ab!", "abc"]),
        ('root ::= item rest\nrest ::= "" | rest "," item\nitem ::= [a-z]+ ","?', ["a,b", "a,,b,", "a"], [",a", ""]),
        ('root ::= x{2,3} y{2,} z{1}\nx ::= "a"|\ny::=[0-9] z ::= "\\x21"', ["aa12!", "12!"], ["1!", "aaaa12!"]),
        ('root ::= (a-rule | b_rule)*\na-rule ::= "\\u00e9\\U0001F600"\nb_rule ::= "/\\"\\n"', ["", 'é😀/"\n'], ["é"]),
        ('root ::= x{0} "b" (x{ 0, 0 } y){0} root?\nx ::= "a"\ny ::= root | x{0}', ["b", "bb"], ["", "a", "ab"]),
        ('root ::= "a"{0}', [""], ["a"]),
        ("root ::= .*", ["", "a\nb"], []),
        ('root ::= -id-kv 2fa\n-id-kv ::= "a"\n2fa ::= "b"', ["ab"], ["a"]),  # so llama.cpp names a property `_id`
    ],
)
def test_answers_are_those_that_the_rules_have(source, answers, others):
    grammar = Grammar(GrammarKind.GRAMMAR, source)
    assert [text for text in answers + others if BYTES.follows(grammar, text)] == answers


def test_only_terminals_that_make_no_difference_are_terminals():
    assert re.findall(r"(?m)^(\w)\d+:", gbnf.to_lark(JSON)) == list("rrrrTTT")
    assert re.findall(r"(?m)^(\w)\d+:", gbnf.to_lark(SUMS)) == list("rrrrrr")
    assert re.findall(r"(?m)^(\w)\d+:", gbnf.to_lark('root ::= a a\na ::= "x"')) == list("TT")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('root ::= "a', r'begun by ", has no end on its line \(line 1, column 10\)'),
        ("root ::= x\nx ::= (\n  [a]", r"A group has no end \(line 2, column 7\)"),
        ("root ::= a", r"The rule a is not defined \(line 1, column 10\)"),
        ('x ::= "a"', "There is no rule root"),
        ('root ::= "a"\nroot ::= "b"', r"The rule root is defined twice \(line 2, column 1\)"),
        ('root ::= "\\q"', r"The escape \\q is not known \(line 1, column 11\)"),
        ("root ::= [\\ud800]", "The escape .* is not known"),
        ('root ::= * "a"', r"Nothing stands before \*"),
        ('root ::= "a"**', r"\* repeats a repetition"),
        ('root ::= "a")', r"\) is not expected here \(line 1, column 13\)"),
        ("root ::= <think>", "Special tokens can't be named"),
        ('root ::= (= "a") "a"', "= is not expected here"),
        ('root ::= "a"{5,2}', "minimum above its maximum"),
        ('root ::= "a"{5,200000}', "more than 100000 times"),
        ("root ::= [z-a]", "a range that goes backwards"),
        ("root ::= []", r"The class \[\] is empty"),
        ("root ::= " + "(" * 70, "More than 60 groups"),
        ('"a" ::= "b"\nroot ::= ""', "A rule begins with its name"),
    ],
)
def test_an_error_says_the_line_and_the_column(source, said):
    with pytest.raises(Rejected) as raised:
        gbnf.to_lark(source)
    assert re.search(said, raised.value.detail)
    assert raised.value.detail.startswith("The grammar, read as GBNF, can't be followed")
    assert re.search(r"\(line \d+, column \d+\)\. [A-Z]", raised.value.detail)


CHAIN = ['root ::= s0 root | "x"\n']
CHAIN += [f's{nth} ::= s{nth + 1} t{nth} | s{nth} "y"\nt{nth} ::= [a-z]+\n' for nth in range(350)]


def zigzag(num: int) -> str:
    """A chain of rules with every second link in the other half, so a pass in either direction follows one link."""
    names = [f"{chr(97 + nth // 676)}{chr(97 + nth // 26 % 26)}{chr(97 + nth % 26)}" for nth in range(num)]
    chain = ['aaa::="a"|root "b"', *(f"{name}::={before}?" for before, name in pairwise(names))]
    return "\n".join([f"root::={names[-1]}", *chain[::2], *chain[1::2]])


@pytest.mark.parametrize(
    "source",
    [
        "root ::= " + "[a-z] | root " * 1_200,
        zigzag(1_450),
        'root ::= r0 root | ""\n' + "".join(f"r{nth} ::= r{nth + 1} r{nth + 1}\n" for nth in range(700)) + 'r700 ::= "a"',
        "root ::= ((((([a-y]*)*)*)*)* [b-z]*)* root?",
        'root ::= (x "c")* root?\nx ::= ' + " ".join("[ab]" for _ in range(1_500)),
        "".join(CHAIN) + 's350 ::= "k"',
        's350 ::= "k"\n' + "".join(reversed(CHAIN)),
        'root ::= ((x | [a-z]) "!")* root?\nx ::= [a-z]* "a" ' + "[a-z] " * 20,
    ],
)
def test_reading_takes_no_long_time(source):
    assert len(source) <= MAX_LARK_CHARS
    assert thread_s(lambda: gbnf.to_lark(source)) < 0.5


def test_lark_and_gbnf_are_told_apart():
    assert gbnf.is_gbnf('root ::= "a"')
    assert gbnf.is_gbnf('# a comment\n\n  root\t::= "a"')
    assert not gbnf.is_gbnf('start: "::=" | WORD\nWORD: /x ::= y/')
    assert not gbnf.is_gbnf('start: "a"')
