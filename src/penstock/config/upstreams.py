"""The `[[upstreams]]` tables of a config file: models of other servers that speak OpenAI's API, for routes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from penstock.config.tables import Table, check_keys, count_of, name_of, number_of, parse_tables, pattern_of, text_of
from penstock.types.errors import ConfigError
from penstock.types.tenant_limits import UNLIMITED, TenantLimits

UPSTREAMS = "upstreams"
DEFAULT_SILENCE_S, DEFAULT_ANSWER_S, DEFAULT_CONCURRENT = 60.0, 600.0, 64
MAX_LIMIT = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    name: str
    """The upstream's name in routes."""
    url: str
    """Base URL such as `https://api.example.com/v1`, to which paths such as `/chat/completions` are appended."""
    model: str
    """The model's name at the upstream."""
    key: str = field(default="", repr=False)
    max_silence_s: float = DEFAULT_SILENCE_S
    """Longest time without a byte in a stream."""
    max_answer_s: float = DEFAULT_ANSWER_S
    """Longest time for an unstreamed answer."""
    max_concurrent: int = DEFAULT_CONCURRENT
    tenant_limits: TenantLimits = UNLIMITED
    """Default limits of the server's tenants, as at its own models. They are settings of the command, not keys of the table."""
    never_keys: tuple[str, ...] = ()
    """Names of API keys whose requests are never sent to the upstream."""
    never_matching: tuple[re.Pattern[str], ...] = ()
    """A request is never sent to the upstream if one of these patterns is found in one of its texts."""

    def keeps_text(self, texts: Iterable[str]) -> bool:
        """Return whether `never_matching` forbids to send these texts to the upstream."""
        return any(pattern.search(text) for text in texts for pattern in self.never_matching)


_KEYS = ("name", "url", "model", "key_env", "max_silence_s", "max_answer_s", "max_concurrent", "never_keys", "never_matching")


def parse_upstreams(tables: object, place: str) -> tuple[UpstreamConfig, ...]:
    """Parse the tables, and read API keys from the environment. Raises ConfigError with a message that begins with `place`."""
    return parse_tables(tables, UPSTREAMS, place, _parse)


def _parse(table: Table, place: str) -> UpstreamConfig:
    check_keys(table, _KEYS, place)
    name, url = name_of(table, place), text_of(table, "url", place)
    if not is_address(url):
        raise ConfigError(f"{place}{url!r} is not the address of a server.", remedy="Write it as https://api.example.com/v1.")
    return UpstreamConfig(
        name=name,
        url=url.rstrip("/"),
        model=text_of(table, "model", place) if "model" in table else name,
        key=_key(text_of(table, "key_env", place), place) if "key_env" in table else "",
        max_silence_s=number_of(table, "max_silence_s", DEFAULT_SILENCE_S, 1, MAX_LIMIT, place),
        max_answer_s=number_of(table, "max_answer_s", DEFAULT_ANSWER_S, 1, MAX_LIMIT, place),
        max_concurrent=count_of(table, "max_concurrent", DEFAULT_CONCURRENT, 1, MAX_LIMIT, place),
        never_keys=_texts(table, "never_keys", place),
        never_matching=tuple(pattern_of(text, place) for text in _texts(table, "never_matching", place)),
    )


def is_address(url: str) -> bool:
    """Return whether this is the URL of a server, without a password or a query, which the log would show."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        has_more = parts.username is not None or parts.password is not None or parts.query or parts.fragment
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and not has_more
    except ValueError:  # such as a port of 99999
        return False


def _key(variable: str, place: str) -> str:
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(f"{place}the environment variable {variable} has no key.", remedy=f"Set {variable}.")
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(f"{place}the key in {variable} has blanks or signs that no key has.", remedy="Set it anew.")
    return key


def _texts(table: Table, key: str, place: str) -> tuple[str, ...]:
    value: Any = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(f"{place}{key} is not a list of texts.", remedy="docs/routes.md shows an upstream.")
    return tuple(value)
