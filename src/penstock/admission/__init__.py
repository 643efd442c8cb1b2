"""Who may come in: the door and its checks. Decides over integers: no clock, no randomness, no I/O."""

from penstock.admission.ask import Ask
from penstock.admission.door import (
    DEFAULT_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    RESTART_RETRY_AFTER_S,
    Admission,
    Place,
)
from penstock.admission.limits import DEFAULT_KV_HEADROOM, AdmissionLimits

__all__ = [
    "DEFAULT_KV_HEADROOM",
    "DEFAULT_RETRY_AFTER_S",
    "MAX_RETRY_AFTER_S",
    "MIN_RETRY_AFTER_S",
    "RESTART_RETRY_AFTER_S",
    "Admission",
    "AdmissionLimits",
    "Ask",
    "Place",
]
