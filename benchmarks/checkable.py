"""Questions whose answers a program can check: arithmetic, a JSON object from a sentence, and a function that runs.

Each is a chat with a few examples. The easy ones are so by their form: a sum or a product of two digits, facts that one plain
sentence states in order, a function of one operation.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

RUN_TIMEOUT_S = 5.0
EASY, HARD = "easy", "hard"
Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Task:
    kind: str
    """Such as `code/easy`."""
    chat: Chat
    max_tokens: int
    is_right: Callable[[str], bool]


def make_tasks(num_each: int, easy_share: float, seed: int) -> list[Task]:
    """Return so many different questions of each kind, mixed."""
    rng = random.Random(seed)
    tasks: list[Task] = []
    for kind in (arithmetic, extraction, code):
        seen: set[str] = set()
        while len(seen) < num_each:
            task = kind(rng, EASY if rng.random() < easy_share else HARD)
            if (text := task.chat[-1]["content"]) not in seen:
                seen.add(text)
                tasks.append(task)
    rng.shuffle(tasks)
    return tasks


def _chat(examples: Sequence[tuple[str, str]], question: str) -> Chat:
    turns = [
        {"role": role, "content": text} for pair in examples for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [*turns, {"role": "user", "content": question}]


# Arithmetic

SUMS = (
    ("2 + 3", 5),
    ("9 - 4", 5),
    ("3 * 4", 12),
    ("12 + 35", 47),
    ("20 + 7", 27),
    ("8 * 6", 48),
    ("7 + 9", 16),
    ("60 - 20", 40),
)
SUM_EXAMPLES = tuple((text, f"{text} = {result}") for text, result in SUMS)


def arithmetic(rng: random.Random, level: str) -> Task:
    """Two numbers: of one digit if easy. The easy ones repeat soon, so a phrase before them makes them differ."""
    if level == EASY:
        first, sign, second = rng.randrange(1, 10), rng.choice("+*"), rng.randrange(1, 10)
    else:
        first, sign, second = rng.randrange(12, 1000), rng.choice("+-*"), rng.randrange(12, 100)
    sums = {"+": first + second, "-": first - second, "*": first * second}
    text = rng.choice(PHRASES).format(f"{first} {sign} {second}")
    return Task(f"arithmetic/{level}", _chat(SUM_EXAMPLES, text), 24, lambda answer: _last_number(answer) == sums[sign])


PHRASES = ("{}", "{} =", "Compute {}", "{} is?", "Calculate {}")


def _last_number(answer: str) -> int | None:
    found = re.findall(r"-?\d+", answer.replace(",", "").partition("\n")[0])
    return int(found[-1]) if found else None


# Extraction

NAMES = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Farid",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Karim",
    "Lena",
    "Marco",
    "Nadia",
    "Oscar",
    "Paula",
    "Quinn",
    "Rosa",
    "Samir",
    "Tanja",
]
CITIES = [
    "Lyon",
    "Oslo",
    "Madrid",
    "Porto",
    "Vienna",
    "Prague",
    "Dublin",
    "Athens",
    "Lisbon",
    "Warsaw",
    "Geneva",
    "Milan",
    "Bergen",
    "Kyoto",
    "Lima",
    "Quito",
]
JOBS = ["nurse", "teacher", "baker", "engineer", "pilot", "lawyer", "farmer", "painter", "chemist", "driver"]
FORM = "Extract {} from this text as a JSON object with exactly these keys, and write nothing else.\n\n{}"
FACT_EXAMPLES = (
    (FORM.format("name, city", "Theo lives in Turin."), '{"name": "Theo", "city": "Turin"}'),
    (FORM.format("name, age", "Vera is 41 years old."), '{"name": "Vera", "age": 41}'),
    (FORM.format("name, job", "We met Uwe, a plumber."), '{"name": "Uwe", "job": "plumber"}'),
    (
        FORM.format("name, age, city", "Kira (29) has left Bern and lives in Basel."),
        '{"name": "Kira", "age": 29, "city": "Basel"}',
    ),
)
SENTENCES = {
    EASY: (
        (("name", "city"), "{name} lives in {city}."),
        (("name", "age"), "{name} is {age} years old."),
        (("name", "job"), "{name} works as a {job}."),
        (("name", "age", "city"), "{name}, {age}, lives in {city}."),
    ),
    HARD: (
        (("name", "age", "city", "job"), "{name} is a {age}-year-old {job} from {city}."),
        (("name", "city"), "{name} grew up in {other_city} and moved to {city} last year."),
        (("name", "age"), "When {other_name} was born, {name} was already {age}."),
        (("job", "name"), "The {job} who wrote to {other_name} is called {name}."),
    ),
}


def extraction(rng: random.Random, level: str) -> Task:
    keys, sentence = rng.choice(SENTENCES[level])
    (name, other_name), (city, other_city) = rng.sample(NAMES, 2), rng.sample(CITIES, 2)
    facts = {"name": name, "city": city, "age": rng.randrange(18, 80), "job": rng.choice(JOBS)}
    text = FORM.format(", ".join(keys), sentence.format(**facts, other_name=other_name, other_city=other_city))
    wanted = {key: facts[key] for key in keys}
    return Task(f"extraction/{level}", _chat(FACT_EXAMPLES, text), 80, lambda answer: _object(answer) == wanted)


def _object(answer: str) -> Any:
    found = re.search(r"\{[^{}]*\}", answer)
    try:
        return json.loads(found.group()) if found else None
    except ValueError:
        return None


# Code


@dataclass(frozen=True)
class Function:
    level: str
    parameters: str
    does: str
    expression: str
    """The value that it should return."""
    cases: tuple[tuple[Any, ...], ...]


FUNCTIONS = (
    Function(EASY, "a, b", "returns the sum of a and b", "a + b", ((1, 2), (5, -3))),
    Function(EASY, "a, b", "returns a minus b", "a - b", ((1, 2), (5, -3))),
    Function(EASY, "a, b", "returns the product of a and b", "a * b", ((3, 2), (5, -3))),
    Function(EASY, "a, b", "returns a to the power of b", "a ** b", ((2, 3), (5, 0))),
    Function(EASY, "x", "returns the square of x", "x * x", ((3,), (-5,))),
    Function(EASY, "x", "returns the double of x", "2 * x", ((3,), (-5,))),
    Function(EASY, "x", "returns the absolute value of x", "abs(x)", ((3,), (-5,))),
    Function(EASY, "n", "returns True if n is even, else False", "n % 2 == 0", ((3,), (4,), (0,))),
    Function(EASY, "xs", "returns the sum of the list xs", "sum(xs)", (([3, 9, 2],), ([],))),
    Function(EASY, "xs", "returns the length of the list xs", "len(xs)", (([3, 9],), ([],))),
    Function(EASY, "xs", "returns the largest number of the list xs", "max(xs)", (([3, 9, 2],), ([-1],))),
    Function(EASY, "s", "returns the string s in upper case", "s.upper()", (("abc",), ("aB",))),
    Function(EASY, "s", "returns the string s reversed", "s[::-1]", (("abc",), ("",))),
    Function(HARD, "s", "returns the number of vowels in s", "sum(c in 'aeiou' for c in s)", (("banana",), ("xyz",))),
    Function(HARD, "n", "returns the factorial of n", "__import__('math').factorial(n)", ((0,), (5,))),
    Function(HARD, "s", "returns True if s reads the same backwards, else False", "s == s[::-1]", (("anna",), ("ab",))),
    Function(HARD, "xs", "returns xs without repetitions, in order", "list(dict.fromkeys(xs))", (([3, 1, 3, 2],), ([],))),
    Function(HARD, "x, low, high", "returns x limited to low and high", "max(low, min(x, high))", ((5, 0, 3), (-1, 0, 3))),
    Function(
        HARD, "n", "returns True if n is a prime, else False", "n > 1 and all(n % d for d in range(2, n))", ((1,), (9,), (13,))
    ),
    Function(HARD, "xss", "returns one list of all elements of the lists in xss", "sum(xss, [])", (([[1], [2, 3]],), ([],))),
    Function(HARD, "n", "returns the sum of the digits of n", "sum(map(int, str(n)))", ((123,), (9,))),
    Function(
        HARD,
        "a, b",
        "returns True if a and b have the same letters, else False",
        "sorted(a) == sorted(b)",
        (("abc", "cab"), ("ab", "abb")),
    ),
    Function(HARD, "n", "returns n as a string of binary digits", "bin(n)[2:]", ((5,), (0,))),
    Function(
        HARD, "xs", "returns the second largest different number of xs", "sorted(set(xs))[-2]", (([3, 9, 2],), ([5, 5, 4],))
    ),
)
NAMES_OF_FUNCTIONS = [
    "f",
    "g",
    "solve",
    "compute",
    "task",
    "helper",
    "run",
    "process",
    "apply",
    "handle",
    "result",
    "answer",
    "work",
    "evaluate",
    "calc",
    "make",
]
LEADS = ("Write a Python function", "Define a Python function", "Please write a Python function")
CODE_EXAMPLES = (
    ("Write a Python function half(x) that returns x divided by 2. Write only the function.", "def half(x):\n    return x / 2"),
    (
        "Define a Python function task(xs) that returns the positive numbers of the list xs. Write only the function.",
        "def task(xs):\n    return [x for x in xs if x > 0]",
    ),
    (
        "Write a Python function first(s, k) that returns the first k letters of s. Write only the function.",
        "def first(s, k):\n    return s[:k]",
    ),
)


def code(rng: random.Random, level: str) -> Task:
    function = rng.choice([one for one in FUNCTIONS if one.level == level])
    name = rng.choice(NAMES_OF_FUNCTIONS)
    text = f"{rng.choice(LEADS)} {name}({function.parameters}) that {function.does}. Write only the function."
    return Task(f"code/{level}", _chat(CODE_EXAMPLES, text), 160, lambda answer: _runs(answer, name, function))


def _runs(answer: str, name: str, function: Function) -> bool:
    """Run the function in another process, and compare what it returns."""
    fenced = re.search(r"```(?:python)?\n(.*?)(?:```|$)", answer, re.DOTALL)
    call = "(*copy.deepcopy(case))"
    checks = (
        f"import copy\nwanted = lambda {function.parameters}: {function.expression}\n"
        f"for case in {function.cases!r}:\n    assert {name}{call} == wanted{call}\nprint('right')\n"
    )
    program = (fenced.group(1) if fenced else answer) + "\n" + checks
    command = [sys.executable, "-I", "-c", program]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0 and ended.stdout.endswith("right\n")
