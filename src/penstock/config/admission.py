"""The settings of the admission: what a request is turned away for. Read by `build`'s parts; turns nobody away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.config.setting import Component, Kind, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig(Component):
    """Who is let in. What each check does: docs/admission.md."""

    title: ClassVar[str] = "Admission"

    max_queue: int = setting(1024, "Requests that may wait; more are answered 429.", kind=Kind.COUNT, minimum=1)
    slo_ttft_s: float | None = setting(
        None,
        "Target of the time to first token; who is expected to wait longer is answered 429.",
        kind=Kind.DURATION,
        key="slo_ttft",
        minimum=0.001,
        default_doc="none: who waits is not turned away for it",
    )
    kv_headroom: float = setting(
        0.2,
        "Share of the KV blocks kept free for growth: else requests with a TTFT target are answered 429; 0: they wait.",
        kind=Kind.SHARE,
        minimum=0.0,
        maximum=0.9,
    )
    tenant_max_concurrent: int | None = setting(
        None,
        "Requests of one tenant that may run or wait; more are answered 429.",
        kind=Kind.COUNT,
        minimum=1,
        default_doc="none",
    )
    tenant_tokens_per_minute: int | None = setting(
        None,
        "Tokens, prompt and output, that one tenant may use; more are answered 429.",
        kind=Kind.COUNT,
        minimum=1,
        default_doc="none",
    )
