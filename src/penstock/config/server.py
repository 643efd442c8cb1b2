"""The settings of the HTTP side: address, keys and limits. Read by `serve` and `build`; listens to nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.config.setting import Component, Kind, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Component):
    """The HTTP side."""

    title: ClassVar[str] = "Server"

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 is every network.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", kind=Kind.COUNT, minimum=0, maximum=65535)
    api_keys: tuple[str, ...] = setting(
        (), "Key that clients must send; may be repeated.", key="api_key", default_doc="no key is asked for", is_multiple=True
    )
    api_key_file: str | None = setting(
        None, "File with one key per line; # begins a comment.", kind=Kind.PATH, default_doc="none"
    )
    trust_tenant_header: bool = setting(
        False,
        "With API keys, a call's tenant is what X-Tenant says; else it is the key. For a gateway that sets the header.",
        kind=Kind.FLAG,
    )
    ssl_certfile: str | None = setting(None, "TLS certificate (PEM).", kind=Kind.PATH, default_doc="none: plain HTTP")
    ssl_keyfile: str | None = setting(None, "TLS private key (PEM).", kind=Kind.PATH, default_doc="none")
    max_connections: int | None = setting(
        None,
        "Connections that may have a request at once. Idle ones beyond are closed for new ones, requests beyond answered 503.",
        kind=Kind.COUNT,
        minimum=1,
        default_doc="8192, with TLS 1024, or as many as the limit of open files leaves",
    )
    max_body_bytes: int = setting(
        4 << 20, "Largest request body; a larger one is answered 413.", kind=Kind.SIZE, key="max_body_size", minimum=1024
    )
    ignore_unknown_parameters: bool = setting(
        False,
        "Requests may have parameters that are unknown, or hints that are not followed, instead of a 400; each is logged once.",
        kind=Kind.FLAG,
    )
    seed: int | None = setting(
        None,
        "Makes answers repeatable: requests without a seed draw theirs from this one, in order of arrival.",
        kind=Kind.COUNT,
        minimum=0,
        default_doc="from the system's entropy",
    )
    explained_requests: int = setting(
        1000,
        "Ended requests that GET /v1/requests/{id} still explains; 0: none is explained, not even one that runs.",
        kind=Kind.COUNT,
        minimum=0,
        maximum=100_000,
    )
    slow_request_s: float | None = setting(
        None,
        "A request that took longer is explained by a warning in the log.",
        kind=Kind.DURATION,
        key="log_slow_requests",
        minimum=0.0,
        default_doc="none",
    )
    request_timeout_s: float | None = setting(
        None,
        "Longest time that a request may take, its wait included; a client may ask for less.",
        kind=Kind.DURATION,
        key="request_timeout",
        minimum=0.001,
        default_doc="none",
    )
    queue_timeout_s: float | None = setting(
        None,
        "Longest time that a request may wait for its turn; a client may ask for less.",
        kind=Kind.DURATION,
        key="queue_timeout",
        minimum=0.001,
        default_doc="none",
    )
    first_token_timeout_s: float | None = setting(
        None,
        "Longest time to the first token; a client may ask for less.",
        kind=Kind.DURATION,
        key="first_token_timeout",
        minimum=0.001,
        default_doc="none",
    )
    shutdown_timeout_s: float = setting(
        30.0,
        "After SIGTERM, how long running requests may take to finish.",
        kind=Kind.DURATION,
        key="shutdown_timeout",
        minimum=0.0,
    )
