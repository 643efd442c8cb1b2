"""Answers to schemas against another validator: `make test-schemas`. Run by `run.sh`, which fetches what this needs.

    python tests/schemas/check.py SUITE [--walks 15] [--generated 500]

SUITE is the folder `tests` of JSON-Schema-Test-Suite. Each schema of five drafts, and each generated one, is refused with a
message that names one of its keywords, or followed: random answers are valid, valid instances are taken byte by byte, and
invalid ones are not. Differences are printed, unless `KNOWN` has them; then the status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import jsonschema

from support.schemas.bytewise import Bytewise, spelled
from support.schemas.generated import schema as generated_schema

DRAFTS: dict[str, tuple[str, Any]] = {
    "draft4": ("http://json-schema.org/draft-04/schema#", jsonschema.Draft4Validator),
    "draft6": ("http://json-schema.org/draft-06/schema#", jsonschema.Draft6Validator),
    "draft7": ("http://json-schema.org/draft-07/schema#", jsonschema.Draft7Validator),
    "draft2019-09": ("https://json-schema.org/draft/2019-09/schema", jsonschema.Draft201909Validator),
    "draft2020-12": ("https://json-schema.org/draft/2020-12/schema", jsonschema.Draft202012Validator),
}
KNOWN = {
    "is only an annotation": "formats are followed",
    "different property order": "a const is written in the order of the schema",
    "float": "integers, and numbers of const and enum, have one spelling",
    "[0.0] is valid": "as above",
    "[1.0] is valid": "as above",
    "overflow handling is implemented": "integers have no exponent",
    "leap second": "no second is the 60th",
    "in the local part is valid": "e-mail addresses have no quotes",
    "IPv6-address-literal after the @": "e-mail addresses have a host name",
    "mixed format": "IPv6 addresses have no dots",
    "a long valid ipv6": "as above",
    "zero-width whitespace": "U+FEFF is no white space, as in Unicode",
    "ref valid, maxItems ignored": "what stands beside a $ref counts in every draft",
    "base64": "contentEncoding is an annotation, as in later drafts",
    "validly-encoded invalid JSON": "as above",
    "an invalid JSON document": "as above",
}
"""Parts of descriptions, and why the answer is another one here."""
NAMED = {"schema false", "format", "keywords", "json_schema is recursive"}
"""Further things that a message may name: keywords of a schema that all know, such as that of the draft, and of the whole."""
OTHER_REGEX = "optional/ecmascript-regex.json"
"""The validator reads patterns as Python does, in which \\W has no letters of any script, and \\p is an error."""


def suite_schemas(suite: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A draft, a place and a group of tests."""
    for draft in DRAFTS:
        for path in sorted((suite / draft).rglob("*.json")):
            for group in json.loads(path.read_text(encoding="utf-8")):
                yield draft, f"{draft}/{path.relative_to(suite / draft)}: {group['description']}", group


def keywords_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keywords_of, value.values()))
    return set().union(*map(keywords_of, value)) if isinstance(value, list) else set()


def in_order(schema: Any, value: Any) -> Any:
    """A value with the fields of objects in the order of all `properties` and `required`."""
    names: list[str] = []

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            for name in ("properties", "required"):
                names.extend(one for one in node.get(name) or () if isinstance(one, str))
            for inside in node.values():
                collect(inside)
        elif isinstance(node, list):
            for inside in node:
                collect(inside)

    def place(name: str) -> int:
        return names.index(name) if name in names else len(names)

    def ordered(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: ordered(node[name]) for name in sorted(node, key=place)}
        return [ordered(inside) for inside in node] if isinstance(node, list) else node

    collect(schema)
    return ordered(value)


def is_multiple(error: Any) -> bool:
    """Only in binary it is none, as 8.7 of 0.1."""
    is_it = error.validator == "multipleOf"
    return is_it and Decimal(str(error.instance)) % Decimal(str(error.validator_value)) == 0


class Checker:
    def __init__(self, num_walks: int) -> None:
        self._answers = Bytewise()
        self._num_walks = num_walks
        self.counts: Counter[str] = Counter()
        self.num_wrong = 0

    def check(self, where: str, schema: Any, validator: Any, tests: list[dict[str, Any]]) -> None:
        refusal = self._answers.refusal(schema)
        if refusal is not None:
            self.counts["refused"] += 1
            if isinstance(schema, dict) and not any(name in refusal for name in keywords_of(schema) | NAMED):
                self._tell(where, "no keyword is named", refusal, schema)
            return
        self.counts["followed"] += 1
        for test in tests:
            texts = {spelled(test["data"]), spelled(in_order(schema, test["data"]))}
            is_taken = any(self._answers.is_answer(schema, text) for text in texts)
            self.counts["instances"] += 1
            if is_taken != test["valid"]:
                if any(part in test["description"] for part in KNOWN):
                    self.counts["instances, known"] += 1
                else:
                    self._tell(where, "is taken" if is_taken else "is not taken", test["description"], schema)
        random = Random(where)
        checks = validator(schema, format_checker=validator.FORMAT_CHECKER)
        for _ in range(self._num_walks):
            answer = self._answers.walk(schema, random)
            self.counts["walks" if answer is not None else "walks without an end"] += 1
            if answer is None or OTHER_REGEX in where:
                continue
            errors = [error.message for error in checks.iter_errors(json.loads(answer)) if not is_multiple(error)]
            if errors:
                self._tell(where, "answer", f"{answer.decode()}: {errors[0]}", schema)
                return

    def _tell(self, where: str, what: str, detail: str, schema: Any) -> None:
        self.num_wrong += 1
        print(f"{where}\n    {what}: {detail[:300]}\n    {json.dumps(schema)[:1000]}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", type=Path)
    parser.add_argument("--walks", type=int, default=15)
    parser.add_argument("--generated", type=int, default=500)
    asked = parser.parse_args()
    checker = Checker(asked.walks)
    for draft, where, group in suite_schemas(asked.suite):
        uri, validator = DRAFTS[draft]
        schema = group["schema"]
        checker.check(where, {"$schema": uri, **schema} if isinstance(schema, dict) else schema, validator, group["tests"])
    if not checker.counts["followed"]:
        print(f"There is no suite in {asked.suite}.")
        return 1
    print("suite:", dict(checker.counts), f"{checker.num_wrong} wrong")
    checker.counts.clear()
    for seed in range(asked.generated):
        checker.check(f"generated {seed}", generated_schema(seed), jsonschema.Draft202012Validator, [])
    print("generated:", dict(checker.counts), f"{checker.num_wrong} wrong in all")
    return int(checker.num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
