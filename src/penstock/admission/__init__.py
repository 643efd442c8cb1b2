"""The door: who may come in. Decides over integers: no clock, no randomness, no I/O."""

from penstock.admission.checks import Ask
from penstock.admission.door import (
    DEFAULT_KV_HEADROOM,
    DEFAULT_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    RESTART_RETRY_AFTER_S,
    Admission,
    AdmissionLimits,
    Place,
)

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
