"""Chats whose answers repeat much, little or nothing: for measurements of speculation, whose guesses are repetitions.

Each workload is a list of chats, the same at every call. Texts are from ShareGPT, questions of arithmetic from RouteLLM
(`workloads.py` says where the traces are looked for), functions from the standard library, the rest is made here.
"""

from __future__ import annotations

import gzip
import importlib
import inspect
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from checkable import CITIES, JOBS, NAMES, Chat
from workloads import DEFAULT_TRACES, trace_file

from penstock.lab.traces import read_conversations

MOST = 64
"""Most chats of a workload."""
MAX_TOKENS = 200
"""Longest answer."""
ROUTELLM_FILE = "routellm_open.jsonl.gz"
TEXT_CHARS, MAX_CHAT_CHARS = range(700, 1500), 3500


def ask(text: str) -> Chat:
    return [{"role": "user", "content": text}]


@cache
def texts() -> tuple[str, ...]:
    """Return prose: replies in English without lists or code."""
    replies = (reply for turns in read_conversations(trace_file(DEFAULT_TRACES)) for _, reply in turns)
    found = (reply for reply in replies if len(reply) in TEXT_CHARS and reply.isascii() and reply.count("\n") < 6)
    return tuple(itertools.islice((reply for reply in found if not re.search(r"```|[*#<>|]", reply)), MOST))


# Answers that repeat the prompt

FUNCTIONS = (
    "colorsys.yiq_to_rgb colorsys.rgb_to_hls colorsys.hsv_to_rgb fnmatch.filter functools.total_ordering html.escape "
    "html.unescape shutil.copymode shutil.copy shutil.copy2 statistics.mean statistics.median string.capwords textwrap.wrap "
    "textwrap.fill textwrap.shorten textwrap.indent base64.b64encode quopri.needsquoting urllib.parse.quote_plus "
    "email.utils.format_datetime ast.copy_location filecmp.cmpfiles getopt.do_shorts"
)
CHANGES = (
    "Rename the first parameter to `value`.",
    "Replace the docstring by a better one.",
    "Add type annotations to the parameters.",
    "Print the result before it is returned.",
)


def code_edit() -> Iterator[Chat]:
    for shift, (number, name) in itertools.product(range(len(CHANGES)), enumerate(FUNCTIONS.split())):
        change = CHANGES[(number + shift) % len(CHANGES)]
        module, _, function = name.rpartition(".")
        source = inspect.getsource(getattr(importlib.import_module(module), function))
        yield ask(f"{change} Answer with the complete function, otherwise unchanged.\n\n```python\n{source}```")


PERSON = "{name}, {age}, is a {job} from {city}."
OTHER_PERSON = "The {job} {name} ({age}) has moved to {city}."


def json_fields() -> Iterator[Chat]:
    rng = random.Random(1)
    while True:
        people = zip(rng.sample(NAMES, 4), rng.sample(CITIES, 4), rng.choices(JOBS, k=4), strict=True)
        text = " ".join(
            rng.choice((PERSON, OTHER_PERSON)).format(name=name, city=city, job=job, age=rng.randrange(18, 80))
            for name, city, job in people
        )
        yield ask(f"Write the people in this text as a JSON list of objects with name, age, job and city.\n\n{text}")


def sentences() -> Iterator[Chat]:
    for text in texts():
        words = Counter(re.findall(r"[a-z]{6,}", text))
        yield ask(f"Copy, word for word, all sentences of this text with `{words.most_common(1)[0][0]}` in them.\n\n{text}")


def summary() -> Iterator[Chat]:
    for text in texts():
        yield ask(f"Summarize this text in two sentences. Then quote its three most important sentences.\n\n{text}")


REWRITINGS = ("Correct the grammar of this text.", "Rewrite this text in the past tense.", "Translate this text into French.")


def rewriting() -> Iterator[Chat]:
    for text, task in zip(texts(), itertools.cycle(REWRITINGS), strict=False):
        yield ask(f"{task} Change as little as you can.\n\n{text[: TEXT_CHARS.start]}")


# Answers that repeat earlier answers

FACTS = {
    "return an item": "Items can be returned within 30 days of delivery. Print the label from your account, put the item into "
    "its original box, and leave it at any post office. The money is back on your card within 5 working days.",
    "change my address": "Open Account, then Addresses, and choose Edit. An order that was already packed keeps the old "
    "address; call us on 0800 555 017 before noon, and the driver will be told.",
    "get an invoice": "Invoices are sent by email as PDF when the parcel leaves. Older ones are under Account, Orders, "
    "Documents. For a company's invoice, enter the VAT number before you pay.",
    "use the warranty": "All machines have a warranty of 24 months. Send us a photo of the serial number and a description of "
    "the fault. We repair within 10 working days, or replace the machine.",
    "reset my password": "Choose Forgot password on the login page. A link arrives within two minutes and is valid for one "
    "hour. If it does not arrive, look into the spam folder or write to help@example.com.",
    "cancel an order": "Orders can be cancelled until they are packed, which is usually two hours after payment. Open Orders, "
    "choose the order, and press Cancel. Gift cards are refunded to their balance.",
}
PHRASES = ("How do I {}?", "I want to {}. What must I do?", "Please explain to me how to {}.", "Hello! Is it possible to {}?")


def faq() -> Iterator[Chat]:
    rng = random.Random(2)
    for phrase, topic in itertools.cycle(itertools.product(PHRASES, FACTS)):
        others = rng.sample([other for other in FACTS if other != topic], 2)
        passages = "\n\n".join(FACTS[one] for one in rng.sample([topic, *others], 3))
        yield ask(f"Answer from these passages.\n\n{passages}\n\nQuestion: {phrase.format(topic)}")


TOOLS = """You change files. Answer with one call and nothing else, as a JSON object. Calls:
{"name": "read_file", "arguments": {"path": ...}}
{"name": "write_file", "arguments": {"path": ..., "content": ...}}
Read each file, then write it with the change, then go on to the next file."""
CONFIG = """\
[server]
host = "{host}"
port = {port}
workers = 4
timeout = 30

[log]
level = "info"
file = "/var/log/{name}.log"
"""
SERVICES = ("users", "orders", "search", "mail")


def agent() -> Iterator[Chat]:
    """Yield four turns of each agent: its second read, second write, third read, third write."""
    for task in itertools.count():
        files = {f"conf/{name}.toml": CONFIG.format(host="10.0.0.5", port=8000 + task, name=name) for name in SERVICES}
        change = ("host", "10.0.0.5", f"192.168.1.{task}") if task % 2 else ("port", f"{8000 + task}", f"{9000 + task}")
        chat = [{"role": "system", "content": TOOLS}, *ask(f"Set {change[0]} to {change[2]} in {', '.join(files)}.")]
        for path, content in list(files.items())[:3]:
            calls = {
                json.dumps({"name": "read_file", "arguments": {"path": path}}): content,
                json.dumps({"name": "write_file", "arguments": {"path": path, "content": content.replace(*change[1:])}}): "ok",
            }
            for call, result in calls.items():
                if len(chat) > 4:
                    yield list(chat)
                chat += [{"role": "assistant", "content": call}, *ask(f"Result:\n{result}")]


# Answers that repeat little


def turns() -> Iterator[Chat]:
    """Return the third message of a person, after two answers."""
    for conversation in read_conversations(trace_file(DEFAULT_TRACES)):
        flat = [text for turn in conversation[:3] for text in turn][:5]
        if len(flat) == 5 and sum(map(len, flat)) < MAX_CHAT_CHARS:
            yield [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(flat)]


def sharegpt() -> Iterator[Chat]:
    for (prompt, _), *_rest in read_conversations(trace_file(DEFAULT_TRACES)):
        if 20 < len(prompt) < 1500:
            yield ask(prompt)


def arithmetic() -> Iterator[Chat]:
    with gzip.open(trace_file(DEFAULT_TRACES, ROUTELLM_FILE), "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            if row["benchmark"] == "gsm8k":
                yield ask(row["prompt"])


HEROES = ("an old sailor", "a girl who mends clocks", "a fox", "two rival bakers", "a tired robot", "a night nurse")
PLACES = ("in a town without rain", "on a slow train", "under the sea", "in the last library")


def story() -> Iterator[Chat]:
    for form, hero, place in itertools.product(("short story", "letter", "fairy tale"), HEROES, PLACES):
        yield ask(f"Write a {form} about {hero} {place}.")


WORKLOADS: Mapping[str, Callable[[], Iterator[Chat]]] = {
    made.__name__: made
    for made in (code_edit, json_fields, sentences, summary, rewriting, faq, agent, turns, sharegpt, arithmetic, story)
}


def chats(name: str, count: int) -> list[Chat]:
    """Return the first chats of a workload. Raises ValueError if it has fewer."""
    found = list(itertools.islice(WORKLOADS[name](), count))
    if len(found) < count:
        raise ValueError(f"{name} has only {len(found)} chats.")
    return found
