"""Owns the prompts of the golden greedy texts: own-written, the kind of thing that people send to a small model.

Read by `make_golden.py` alone; the tests read the token ids that it made of them.
"""

from __future__ import annotations

from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ParityPrompt:
    """Either `messages`, rendered with the model's chat template, or `text`, taken as it is."""

    name: str
    messages: tuple[Message, ...] = ()
    text: str = ""


def _ask(name: str, content: str) -> ParityPrompt:
    return ParityPrompt(name, messages=({"role": "user", "content": content},))


_LEASE = """Please summarise the following notice for a tenant in three short bullet points.

NOTICE TO ALL RESIDENTS OF 14 HARBOUR STREET

The water supply to the building will be interrupted on Tuesday 14 March between 08:30 and 13:00 while the city \
replaces the main valve below the pavement. Residents are asked to fill a bucket or two on the evening before, to keep \
all taps closed during the work, and to let the water run for at least five minutes afterwards until it is clear. \
Washing machines and dishwashers must not be started before 13:30, because sediment may have come loose and can block \
the inlet filters.

The lift will remain in service, but the laundry room in the basement will be locked from Monday 18:00 to Tuesday \
14:00. Whoever has booked it in this period may choose another slot without charge; the caretaker, Ms Okafor, keeps \
the list in her office on the ground floor, which is open on weekdays from 09:00 to 11:00 and by telephone on \
555-0142.

Finally, a reminder about bicycles: the racks in the courtyard are for bicycles that are in use. From 1 April we shall \
tie a yellow ribbon around every bicycle in the racks. Please remove the ribbon from yours. Those that still carry a \
ribbon on 30 April will be taken to the municipal store, where they can be collected for three months against proof of \
ownership.

We apologise for the inconvenience and thank you for your patience.
The management"""

_CODE_REVIEW = """Explain what this Python module does and point out one possible bug.

```python
import csv
import datetime as dt
from collections import defaultdict


class Ledger:
    def __init__(self, currency="EUR"):
        self.currency = currency
        self.entries = []
        self.by_month = defaultdict(float)

    def add(self, when, amount, note=""):
        if isinstance(when, str):
            when = dt.date.fromisoformat(when)
        self.entries.append((when, amount, note))
        self.by_month[(when.year, when.month)] += amount

    def remove(self, index):
        self.entries.pop(index)

    def balance(self, until=None):
        total = 0
        for when, amount, _ in self.entries:
            if until is None or when <= until:
                total += amount
        return round(total, 2)

    def load(self, path):
        with open(path, newline="") as f:
            for row in csv.DictReader(f):
                self.add(row["date"], float(row["amount"]), row.get("note", ""))

    def report(self):
        lines = []
        for (year, month), total in sorted(self.by_month.items()):
            lines.append(f"{year}-{month:02d}: {total:10.2f} {self.currency}")
        return "\\n".join(lines)
```"""

_LOG = """2024-05-03 07:58:12,114 INFO  [scheduler] starting nightly export, 4 workers, batch size 500
2024-05-03 07:58:12,377 INFO  [worker-1] connected to db-replica-2 (latency 3 ms)
2024-05-03 07:58:12,391 INFO  [worker-2] connected to db-replica-2 (latency 3 ms)
2024-05-03 07:58:12,402 INFO  [worker-3] connected to db-replica-1 (latency 5 ms)
2024-05-03 07:58:12,418 INFO  [worker-4] connected to db-replica-1 (latency 4 ms)
2024-05-03 07:58:20,963 INFO  [worker-1] batch 1/120 written, 500 rows
2024-05-03 07:58:21,004 WARN  [worker-3] batch 2/120 slow: 8.4 s
2024-05-03 07:58:29,551 INFO  [worker-2] batch 3/120 written, 500 rows
2024-05-03 07:58:29,"""

PROMPTS: tuple[ParityPrompt, ...] = (
    _ask("capital", "What is the capital of France, and what is it known for?"),
    _ask("sky", "Why is the sky blue? Explain it to a ten-year-old."),
    _ask("list", "Give me a list of ten things to pack for a week of hiking in the mountains."),
    _ask("python", "Write a Python function that checks whether a string is a palindrome, ignoring case and punctuation."),
    _ask("sql", "Write an SQL query that returns the five customers with the highest total order value in 2023."),
    _ask("arithmetic", "A train leaves at 14:25 and arrives at 17:10. How long is the journey? Show each step."),
    _ask("email", "Write a short, polite email to my landlord asking for the kitchen tap to be repaired."),
    _ask("poem", "Write a short poem about the first snow of the year in a small harbour town."),
    _ask(
        "translate",
        "Translate into French: 'The meeting has been moved to Thursday afternoon, please bring the signed papers.'",
    ),
    _ask("spanish", "¿Cuáles son los ingredientes de una buena tortilla de patatas y cómo se prepara?"),
    _ask("german", "Erkläre mir bitte in zwei Sätzen, was ein Kühlschrank macht."),
    _ask("chinese", "请用一句话介绍一下北京。"),
    _ask("emoji", "What does 🎉🚀😂 mean when a friend sends it after I tell them about a new job?"),
    _ask("json", 'Return a JSON object with the keys "name", "age" and "hobbies" for an invented person. Only JSON, please.'),
    _ask("lease", _LEASE),
    _ask("code_review", _CODE_REVIEW),
    ParityPrompt(
        "multi_turn",
        messages=(
            {"role": "system", "content": "You are a patient cooking teacher. Answer in at most three sentences."},
            {"role": "user", "content": "How do I cook rice so that it does not stick?"},
            {
                "role": "assistant",
                "content": "Rinse the rice until the water runs clear, then use two parts water to one part rice.",
            },
            {"role": "user", "content": "And how long does brown rice take?"},
        ),
    ),
    ParityPrompt(
        "pirate",
        messages=(
            {"role": "system", "content": "You answer every question like a pirate."},
            {"role": "user", "content": "How does a compass work?"},
        ),
    ),
    ParityPrompt(
        "story", text="Once upon a time, in a village at the edge of a dark forest, there lived an old clockmaker who"
    ),
    ParityPrompt("encyclopedia", text="Photosynthesis is the process by which green plants and certain other organisms"),
    ParityPrompt(
        "fibonacci",
        text='def fibonacci(n: int) -> list[int]:\n    """Return the first n Fibonacci numbers."""\n',
    ),
    ParityPrompt("counting", text="1, 2, 3, 5, 8, 13, 21, 34,"),
    ParityPrompt("log", text=_LOG),
    ParityPrompt(
        "html",
        text='<!DOCTYPE html>\n<html lang="en">\n<head>\n  <meta charset="utf-8">\n  <title>Opening hours</title>\n'
        "</head>\n<body>\n  <h1>Opening hours</h1>\n  <table>\n"
        "    <tr><th>Day</th><th>From</th><th>To</th></tr>\n    <tr><td>Monday</td>",
    ),
)
