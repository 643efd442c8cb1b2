"""Splits: a part of the requests for one model goes to another one, such as the same weights with other settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from penstock.config import SharingConfig
from penstock.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A rule that sends a part of the requests for one model's name to another model."""

    of: str
    """The name in the requests."""
    to: str
    """The name of the model that answers this part."""
    share: float = 0.0
    """Share of the users, [0, 1]."""
    tenants: frozenset[str] = frozenset()
    """Tenants that belong to this part with all requests."""


def read_splits(models: Iterable[tuple[str, SharingConfig]]) -> list[Split]:
    """Return the splits that make some of the models answer for others. Raises ConfigError for an incomplete one."""
    return [split for name, sharing in models if (split := _read_split(name, sharing)) is not None]


def _read_split(name: str, sharing: SharingConfig) -> Split | None:
    share, tenants = sharing.split_share, frozenset(sharing.split_tenants)
    if sharing.split_of is None:
        if share is not None or tenants:
            raise ConfigError(
                f"{name} has split_share or split_tenant, and no split_of.", remedy="Name the model whose requests are split."
            )
        return None
    if share is None and not tenants:
        raise ConfigError(
            f"{name} has split_of = {sharing.split_of!r}, and no part of its requests.",
            remedy="Set split_share, such as '10%', or split_tenant.",
        )
    return Split(of=sharing.split_of, to=name, share=share or 0.0, tenants=tenants)


def check_splits(splits: Sequence[Split], names: Sequence[str]) -> None:
    """Raise ConfigError for a split of an unknown name, or if the shares of one name add up to more than 1."""
    for split in splits:
        if split.of not in names or split.of == split.to:
            raise ConfigError(
                f"{split.to} has split_of = {split.of!r}, which is not the name of another model.",
                remedy=f"The models are {', '.join(names)}.",
            )
        total = sum(other.share for other in splits if other.of == split.of)
        if total > 1 + 1e-9:  # shares such as 0.56, 0.34 and 0.1 add up to a little more
            raise ConfigError(f"The parts of the requests for {split.of} add up to {total:.0%}.", remedy="Lower a split_share.")


def part_of(splits: Sequence[Split], name: str, tenant: str, unit: str) -> str:
    """Return the name of the model that answers a request for `name`, by the splits of that name.

    `unit`: id of a user or of a request. The same unit always gets the same model. If the share of the first split of `name`
    grows, its model keeps all units that it had.
    """
    ours = [split for split in splits if split.of == name]
    digest = blake2b(f"{name}\0{unit}".encode(), digest_size=8).digest()
    drawn = int.from_bytes(digest, "big") / 2**64
    for split in ours:
        if tenant in split.tenants:
            return split.to
    for split in ours:
        if drawn < split.share:
            return split.to
        drawn -= split.share
    return name
