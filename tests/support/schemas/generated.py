"""Schemas as programs ask for them: of records, settings, calls of functions, with what generators of schemas write."""

from __future__ import annotations

from random import Random
from typing import Any

_WORDS = ("id", "name", "kind", "size", "tags", "owner", "created at", "état", "a/b", "x~y", 'quo"te', "back\\slash", "n", "")
_PATTERNS = ("^[a-z]{2,5}$", "[0-9]", "^(a|bc)*$", "^x", "z$", r"^\d{3}-\w+$", "^[^\\s]{1,4}$", "^$", "a.b")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri")
_VALUES: tuple[Any, ...] = ("a", "", "é\n", 0, 1, -7, 1.5, True, False, None, [], [1, "b"], {}, {"k": [None]})


def schema(seed: int) -> dict[str, Any]:
    """One of them; the same for the same seed."""
    return _Writer(Random(seed)).whole()


class _Writer:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._names: list[str] = []
        self._is_named = False
        """The part that is being written has a name itself."""

    def whole(self) -> dict[str, Any]:
        random = self._random
        self._names = [f"d{nth}" for nth in range(random.choice((0, 0, 1, 2)))]
        made = self._object(3) if random.random() < 0.6 else self._any(3)
        if self._names:
            self._is_named = True
            made["$defs"] = {name: self._any(1) for name in self._names}
        if random.random() < 0.3:
            made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return made

    def _any(self, depth: int) -> dict[str, Any]:
        random = self._random
        simple = (self._string, self._string, self._number, self._literal, self._untyped)
        deep = (self._object, self._object, self._list, self._choice, self._together, self._ref)
        made = random.choice(deep)(depth - 1) if depth > 0 and random.random() < 0.6 else random.choice(simple)()
        if random.random() < 0.2:
            made |= {"title": "T", "description": "d", "default": None, "examples": [1]}
        if random.random() < 0.01:
            made |= random.choice(({"uniqueItems": True}, {"not": {"type": "null"}}, {"if": {}}, {"contains": {}}))
        return made

    def _string(self) -> dict[str, Any]:
        random = self._random
        made: dict[str, Any] = {"type": "string" if random.random() < 0.8 else ["string", "null"]}
        asks = random.random()
        if asks < 0.2:
            made["pattern"] = random.choice(_PATTERNS)
        elif asks < 0.4:
            made["format"] = random.choice(_FORMATS)
        elif asks < 0.7:
            made |= {"minLength": random.randint(0, 3), "maxLength": random.randint(3, 6)}
        elif asks < 0.75:
            made |= {"pattern": "^[a-z]*$", "minLength": 2, "maxLength": 4}
        elif asks < 0.78:
            made |= {"format": "date", "pattern": "^20"}
        elif asks < 0.8:
            made |= {"format": "date", "enum": ["2024-02-29", "2023-02-29"]}
        return made

    def _number(self) -> dict[str, Any]:
        random = self._random
        made: dict[str, Any] = {"type": random.choice(("integer", "number", ["integer", "null"]))}
        least = random.choice((-100, -1, 0, 0.5, 3))
        if random.random() < 0.5:
            made[random.choice(("minimum", "exclusiveMinimum"))] = least
        if random.random() < 0.5:
            made[random.choice(("maximum", "exclusiveMaximum"))] = least + random.choice((0, 1, 2.25, 10, 1000))
        if random.random() < 0.2:
            made["multipleOf"] = random.choice((1, 2, 5, 0.1, 0.25, 7))
        return made

    def _literal(self) -> dict[str, Any]:
        random = self._random
        if random.random() < 0.3:
            return {"const": random.choice(_VALUES)}
        made: dict[str, Any] = {"enum": random.sample(_VALUES, random.randint(1, 4))}
        if random.random() < 0.3:
            made["type"] = random.choice(("string", "integer", "array", ["string", "null"]))
        return made

    def _untyped(self) -> dict[str, Any]:
        return self._random.choice(
            ({}, {"type": "boolean"}, {"type": "null"}, {"minLength": 1}, {"minimum": 2}, {"required": ["id"]}, {"maxItems": 1})
        )

    def _object(self, depth: int) -> dict[str, Any]:
        random = self._random
        names = random.sample(_WORDS, random.randint(0, 4))
        made: dict[str, Any] = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        if random.random() < 0.7:
            made["required"] = [name for name in names if random.random() < 0.6]
        if random.random() < 0.15:
            made.setdefault("required", []).append("more")
        rest = random.random()
        if rest < 0.5:
            made["additionalProperties"] = False
        elif rest < 0.7:
            made["additionalProperties"] = self._any(0)
        if random.random() < 0.1:
            made["patternProperties"] = {"^p_": self._any(0)}
        if random.random() < 0.1:
            made |= {"required": list(names), "minProperties": len(names), "maxProperties": len(names) + 2}
        return made

    def _list(self, depth: int) -> dict[str, Any]:
        random = self._random
        made: dict[str, Any] = {"type": "array"}
        if random.random() < 0.8:
            made["items"] = self._any(depth)
        if random.random() < 0.3:
            made["prefixItems"] = [self._any(depth) for _ in range(random.randint(1, 3))]
            if random.random() < 0.4:
                made["items"] = False
        if random.random() < 0.5:
            made["minItems"] = random.randint(0, 2)
        if random.random() < 0.5:
            made["maxItems"] = random.randint(1, 4)
        return made

    def _choice(self, depth: int) -> dict[str, Any]:
        random = self._random
        if random.random() < 0.3:
            return {"oneOf": [self._kind(kind, depth) for kind in ("circle", "square", "line")[: random.randint(2, 3)]]}
        made: dict[str, Any] = {"anyOf": [self._any(depth) for _ in range(random.randint(1, 3))]}
        return made | ({"type": random.choice(("object", "string", "integer"))} if random.random() < 0.2 else {})

    def _kind(self, kind: str, depth: int) -> dict[str, Any]:
        properties = {"kind": {"const": kind}, "value": self._any(depth)}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    def _together(self, depth: int) -> dict[str, Any]:
        if self._random.random() < 0.5:
            return {"allOf": [self._object(depth), {"properties": {"n": self._number()}, "required": ["n"]}]}
        return {"allOf": [self._string(), self._string()]}

    def _ref(self, depth: int) -> dict[str, Any]:
        if not self._names:
            return self._any(depth)
        made: dict[str, Any] = {"$ref": f"#/$defs/{self._random.choice(self._names)}"}
        if self._is_named:  # else it might need itself inside
            return {"type": "array", "items": made}
        return made | ({"minLength": 1} if self._random.random() < 0.1 else {})
