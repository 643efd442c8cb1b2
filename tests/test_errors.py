"""Errors that users see."""

from __future__ import annotations

import pickle

import pytest

from penstock.sched.policies.own import OwnPolicyError
from penstock.sched.policies.presets import LacksSetting
from penstock.types.errors import NotEnoughFreeMemory, PenstockError, PolicyError, PutOff, Rejected, RejectReason

ERRORS = [
    PenstockError("It failed.", remedy="Ask again."),
    NotEnoughFreeMemory("It does not fit.", instead="Lower it"),
    PolicyError("order", object(), "failed"),
    OwnPolicyError("order", "./mine.py:Mine", "was not found.", remedy="Name it.", argument="speed"),
    LacksSetting("order", "fcfs", "weights"),
    Rejected(RejectReason.CONTEXT_LENGTH, "It is too long.", param="prompt", retry_after_s=1.0, sizes=(9, 8)),
    PutOff(RejectReason.UNAVAILABLE, "There is no room."),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pass_from_one_process_to_another(error: PenstockError) -> None:
    came = pickle.loads(pickle.dumps(error))
    assert (type(came), str(came), came.args, vars(came)) == (type(error), str(error), error.args, vars(error))
