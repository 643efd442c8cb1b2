"""The API keys that open the server. `cli serve` reads them before it loads anything, and the app does; checks no request."""

from __future__ import annotations

from pathlib import Path

from penstock.config.components import ServerConfig
from penstock.types.errors import ConfigError


def api_keys(config: ServerConfig) -> tuple[str, ...]:
    """All keys that open the server; none: it is open to everyone who can reach it."""
    return config.api_keys + (read_key_file(Path(config.api_key_file)) if config.api_key_file else ())


def read_key_file(path: Path) -> tuple[str, ...]:
    """One key per line; empty lines and those that begin with # do not count. Raises `ConfigError`."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The key file {path} cannot be read: {cause}.", remedy="Check --api-key-file.") from error
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"The key file {path} contains no key.", remedy="Write one key per line.")
    return keys


def isolates_tenants(config: ServerConfig, prefix_sharing: str | None) -> bool:
    """True if each tenant shares cached prefixes with itself alone.

    By default that is so where several keys tell tenants apart, or where a gateway behind one key does.
    """
    if prefix_sharing is not None:
        return prefix_sharing == "tenant"
    num_keys = len(set(api_keys(config)))
    return num_keys > 1 or (num_keys > 0 and config.trust_tenant_header)
