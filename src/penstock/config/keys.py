"""The API keys that clients can use, with their names and limits. Read at the start, and again when a key file changes."""

from __future__ import annotations

import hashlib
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.config.components import ServerConfig
from penstock.config.upstreams import UpstreamConfig
from penstock.types.errors import ConfigError
from penstock.types.tenant_limits import TenantLimits

MAX_NAMED_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
NAME_RULE = "1 to 64 letters, digits or any of . _ : @ / -"
NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
"""A tenant's name: the name of a key, or the value of the header X-Tenant."""
_UNNAMED = "key-"
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_LIMITS = tuple([limit.name for limit in fields(TenantLimits)])
_FIELDS = ("name", "key", "sha256", *_LIMITS, "priority", "models")
_MAX_COUNT = 10**12
_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key: its hash, name and limits, and the models that it may use."""

    name: str
    """The tenant of the key's requests. Safe to log."""
    digest: bytes
    """SHA-256 of the key."""
    limits: TenantLimits | None = None
    """None: the defaults."""
    priority: int | None = None
    """The most urgent priority that its requests may have; lower is first."""
    models: tuple[str, ...] | None = None
    """Models that its requests may use. None: all."""


def api_keys(config: ServerConfig) -> tuple[ApiKey, ...]:
    """Return all API keys of the settings and their files. With none, the server is open to everyone. Raises `ConfigError`."""
    keys = [unnamed(key) for key in config.api_keys]
    if config.api_key_file:
        keys += map(unnamed, read_key_file(Path(config.api_key_file)))
    if config.api_keys_file:
        named = read_named_keys(Path(config.api_keys_file))
        twice = {key.digest for key in keys} & {key.digest for key in named}
        if twice:
            name = next(key.name for key in named if key.digest in twice)
            raise ConfigError(f"The key of {name} is also given without its name and limits.", remedy="Give it once.")
        keys += named
    return tuple(keys)


def missing_never_keys(upstreams: Iterable[UpstreamConfig], keys: Iterable[ApiKey]) -> dict[str, str]:
    """Return the names in `never_keys` that no key has, each with its upstream's name."""
    names = {key.name for key in keys}
    return {name: upstream.name for upstream in upstreams for name in upstream.never_keys if name not in names}


def check_never_keys(
    upstreams: Iterable[UpstreamConfig], keys: Sequence[ApiKey], replaced: Sequence[ApiKey] | None = None
) -> None:
    """Raise ConfigError if an upstream's `never_keys` has the name of an unknown key.

    Keys that are replaced while the server runs may be revoked, but not renamed: their requests would no longer stay here.
    """
    digests = {key.digest for key in keys}
    renamed = None if replaced is None else {key.name for key in replaced if key.digest in digests}
    for name, upstream in missing_never_keys(upstreams, keys).items():
        if renamed is None or name in renamed:
            raise ConfigError(
                f"The upstream {upstream} names the API key {name!r}, which the server does not have.",
                remedy="Correct never_keys, or add the key to the key file.",
            )


def key_paths(config: ServerConfig) -> list[str]:
    """Return the files that `api_keys` reads."""
    return [path for path in (config.api_key_file, config.api_keys_file) if path]


def exposed_paths(config: ServerConfig) -> list[str]:
    """Return the key files with plain-text keys that every user of this machine can read, for a warning."""
    paths = [config.api_key_file] if config.api_key_file else []
    if config.api_keys_file and any("key" in entry for entry in _entries(Path(config.api_keys_file))):
        paths.append(config.api_keys_file)
    return [path for path in paths if Path(path).stat().st_mode & stat.S_IROTH]


def unnamed(key: str) -> ApiKey:
    """Return the `ApiKey` of a key without a name, named after its hash. Raises `ConfigError` if no client can send it."""
    digest = _digest(key)
    return ApiKey(name=_UNNAMED + digest.hex()[:12], digest=digest)


def _digest(key: str) -> bytes:
    """Return the SHA-256 of a key. Refuse a blank key, which a client without a key would match."""
    if not key.strip():
        raise ConfigError("An API key is empty.", remedy="Give --api-key a value.")
    if key != key.strip():
        raise ConfigError("An API key begins or ends with white space, which no header can carry.", remedy="Leave it out.")
    return hashlib.sha256(key.encode()).digest()


def read_key_file(path: Path) -> tuple[str, ...]:
    """Return the keys of a file with one per line. Empty lines and lines that begin with # are skipped."""
    if path.suffix == ".toml":  # each of its lines would be a key that anybody can guess
        raise ConfigError(f"The key file {path} is TOML, and not one key per line.", remedy="Name it by --api-keys-file.")
    lines = [line.strip() for line in _text(path, "--api-key-file").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"The key file {path} contains no key.", remedy="Write one key per line.")
    return keys


def read_named_keys(path: Path) -> list[ApiKey]:
    """Return the keys of `--api-keys-file`, at least one. Raises `ConfigError`, without a key in its text."""
    entries = _entries(path)
    keys = [_read_key(entry, f"The key file {path}, key {number}") for number, entry in enumerate(entries, 1)]
    _refuse_twice([key.name for key in keys], f"The key file {path} has two keys with the name")
    _refuse_twice([key.digest.hex()[:8] for key in keys], f"The key file {path} has one key twice: its SHA-256 begins with")
    return keys


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        table = tomllib.loads(_text(path, "--api-keys-file"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The key file {path} is not TOML: {error}.", remedy="See docs/how-to/deploy.md.") from None
    entries = table.pop("keys", None)
    if table or not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"The key file {path} contains no key, or something else.", remedy="Begin each with a line [[keys]].")
    if len(entries) > MAX_NAMED_KEYS:
        raise ConfigError(f"The key file {path} has {len(entries)} keys.", remedy=f"Give {MAX_NAMED_KEYS} at most.")
    return entries


def _read_key(entry: Mapping[str, Any], place: str) -> ApiKey:
    unknown = [field for field in entry if field not in _FIELDS]
    if unknown:
        raise ConfigError(f"{place}: unknown field {unknown[0]!r}.", remedy=f"Fields: {', '.join(_FIELDS)}.")
    name, models = entry.get("name"), entry.get("models")
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.startswith(_UNNAMED):
        raise ConfigError(f"{place} has no name that can be used.", remedy=f"Write {NAME_RULE}, not beginning with {_UNNAMED}.")
    place += f" ({name})"
    if models is not None and not (isinstance(models, list) and models and all(isinstance(one, str) for one in models)):
        raise ConfigError(
            f"{place}: models is not a list of names.", remedy='Write models = ["name"], or leave it out for all.'
        )
    counts = {field: _count(entry[field], f"{place}: {field}") for field in _LIMITS if field in entry}
    priority = entry.get("priority")
    if priority is not None and (type(priority) is not int or abs(priority) > _MAX_PRIORITY):
        raise ConfigError(f"{place}: priority is not an integer.", remedy="Write priority = 1; lower is served first.")
    return ApiKey(
        name=name,
        digest=_digest_of(entry, place),
        priority=priority,
        models=None if models is None else tuple(models),
        limits=TenantLimits(**counts) if counts else None,
    )


def _digest_of(entry: Mapping[str, Any], place: str) -> bytes:
    key, sha256 = entry.get("key"), entry.get("sha256")
    if isinstance(key, str) and sha256 is None:
        try:
            return _digest(key)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
    if isinstance(sha256, str) and key is None and _SHA256.fullmatch(sha256):
        return bytes.fromhex(sha256)
    remedy = "Write either key, or sha256 with 64 hexadecimal digits (`printf %s KEY | sha256sum`)."
    raise ConfigError(f"{place} has not one of key and sha256.", remedy=remedy)


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_COUNT:
        raise ConfigError(f"{what} is not a count.", remedy="Write an integer of 1 or more, or leave it out for no limit.")
    return value


def _refuse_twice(names: Sequence[str], words: str) -> None:
    name, number = Counter(names).most_common(1)[0]
    if number > 1:
        raise ConfigError(f"{words} {name}.", remedy="Keep one of them.")


def _text(path: Path, flag: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"The key file {path} is larger than {MAX_FILE_BYTES} bytes.", remedy=f"Check {flag}.")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The key file {path} cannot be read: {cause}.", remedy=f"Check {flag}.") from error


def isolates_tenants(config: ServerConfig, prefix_sharing: str | None) -> bool:
    """Return whether each tenant has its own cached prefixes. By default, it does if there are several tenants."""
    return has_several_tenants(config) if prefix_sharing is None else prefix_sharing == "tenant"


def has_several_tenants(config: ServerConfig) -> bool:
    """Return whether several keys, or a gateway behind one key, distinguish tenants. A key file counts: it can get more.

    An admin's key counts, too: it is another tenant than the other keys, or than clients without one. Files are not read: a
    plan for a server may be made where its keys are not.
    """
    if config.admin_api_keys or key_paths(config):
        return True
    num_keys = len({*config.api_keys})
    return num_keys > 1 or (num_keys > 0 and config.trust_tenant_header)
