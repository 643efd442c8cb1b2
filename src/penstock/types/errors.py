"""Errors that cross packages. `serve` maps them to HTTP responses."""

from __future__ import annotations

import errno
import re
from enum import StrEnum

_FOLDERS = re.compile(r"""^/[^:]*/|(?<![\w./:])/(?:[^\s/:'"]+/)+""")
"""The folders of an absolute path. At the beginning of a text they may contain spaces."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_ERRORS = (*DISK_FULL, errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers of a disk that takes no more, and of one that takes nothing from us."""

MAX_TOLD_CHARS = 200
"""Most characters of a client's own text in an error, such as a parameter's name."""


class PenstockError(Exception):
    """Base of every error that a user may see: `message` names the cause, `remedy` what to do (may be empty)."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        # A subclass's own parameters are not in `args`, with which `Exception` would be made again.
        return type(self).__new__, (type(self), *self.args), self.__dict__

    def without_folders(self) -> str:
        """Return the message for clients that must not see where files lie: absolute paths are cut to their last part."""
        return _FOLDERS.sub("", str(self))


class ConfigError(PenstockError):
    """A setting is unknown, malformed or contradicts another."""


def unwritable(path: object, error: OSError) -> ConfigError:
    """Return the error for a file of the user's choice that could not be written."""
    is_full = error.errno in DISK_FULL
    remedy = "Free some space, or name a file on another disk." if is_full else "Name a file in a folder that exists."
    return ConfigError(f"{path} can't be written: {error.strerror}.", remedy=remedy)


class PolicyError(PenstockError):
    """A user's own policy failed while it ran, or gave an answer that the scheduler can't use."""

    def __init__(self, seam: str, policy: object, what: str) -> None:
        """`seam`: the kind of policy. `what`: what the policy did wrong, with the method and the value."""
        name = getattr(policy, "policy_name", "") or type(policy).__qualname__
        remedy = "It is a policy of your own; docs/how-to/policy.md describes the interface."
        super().__init__(f"The {seam} {name!r} {what}.", remedy=remedy)


class ModelError(PenstockError):
    """A model file is missing, corrupt, truncated or of an unsupported kind."""


class ModelChanged(ModelError):
    """A model's files were replaced after it was loaded, so its engine can't be restarted from them."""


def damaged(path: object, cause: str) -> ModelError:
    """Return the error for a model's file that is damaged, incomplete or contradicts itself."""
    remedy = "The file may be damaged: fetch it again and compare checksums. If they match, its converter is at fault."
    return ModelError(f"{path}: {cause}.", remedy=remedy)


class NotEnoughMemory(ConfigError, ModelError):
    """A model does not fit the free memory with these settings."""


class NotEnoughFreeMemory(NotEnoughMemory):
    """The same, where more free memory would help. `instead`: what else would."""

    def __init__(self, message: str, *, instead: str) -> None:
        super().__init__(message, remedy=f"{instead}, or free some memory.")
        self.instead = instead


class DownloadError(PenstockError):
    """Weights could not be downloaded, verified or stored."""


class RejectReason(StrEnum):
    """Why a request was refused, as shown in logs and metrics."""

    INVALID = "invalid"
    CONTEXT_LENGTH = "context_length"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    QUEUE_DELAY = "queue_delay"
    KV_HEADROOM = "kv_headroom"
    TENANT_CONCURRENCY = "tenant_concurrency"
    TENANT_TOKENS = "tenant_tokens"
    TENANT_REQUESTS = "tenant_requests"
    DEADLINE = "deadline"
    QUEUE_TIMEOUT = "queue_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105  # no secret
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"

    @property
    def is_deadline(self) -> bool:
        """Whether a time limit has passed or can't be met, so that retrying does not help."""
        return self in (RejectReason.DEADLINE, RejectReason.QUEUE_TIMEOUT, RejectReason.FIRST_TOKEN_TIMEOUT)


TENANT_REASONS = (RejectReason.TENANT_CONCURRENCY, RejectReason.TENANT_TOKENS, RejectReason.TENANT_REQUESTS)
"""Refusals because of the client's own limits, however much of the server is free."""


class Rejected(PenstockError):
    """A request refused before it produced anything: the user's error, or no capacity."""

    def __init__(
        self,
        reason: RejectReason,
        detail: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        sizes: tuple[int, int] | None = None,
    ) -> None:
        """`param`: the invalid field. `sizes`: tokens of a prompt that is too long, and tokens of the context."""
        super().__init__(detail)
        self.reason = reason
        self.sizes = sizes
        self.detail = detail
        self.param = param
        self.retry_after_s = retry_after_s


class PutOff(Rejected):
    """A background request that is to come again when there is room for its model. No other model answers in its place."""


def wrong(detail: str, param: str | None = None) -> Rejected:
    """Return the error for an invalid request, or for its field `param`."""
    return Rejected(RejectReason.INVALID, detail, param=param)


class ExecutorFailure(PenstockError):
    """The device or its driver failed during a step; its KV can't be trusted any more."""


class GrammarFailure(PenstockError):
    """An answer's grammar became too large, or rejected a sampled token."""


class CorruptBlock(PenstockError):
    """A block read from the tier below the KV pool is not what was written."""


def counted(number: int, noun: str, plural: str = "", *, spec: str = "") -> str:
    """Return `1 token` or `2 tokens`. `plural` is for irregular nouns; `spec` formats the number."""
    return f"{number:{spec}} {noun if number == 1 else plural or f'{noun}s'}"


def shorten(text: str) -> str:
    """Return the first `MAX_TOLD_CHARS` of a client's own text, for a message."""
    return text if len(text) <= MAX_TOLD_CHARS else text[:MAX_TOLD_CHARS] + "..."


class ModelAway(Exception):
    """A request names a model that is not loaded, or is being unloaded. `serve` then loads it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {name} is not loaded")
        self.name = name


class NameUnknown(Exception):
    """A request names a model that was not looked for yet. `serve` looks on the disk for such an adapter."""

    def __init__(self, name: str) -> None:
        super().__init__(f"nobody has asked yet where {name!r} lies")
        self.name = name
