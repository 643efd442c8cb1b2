"""Helpers that `parity/test_beams.py` shares with other tests."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.testing import Outcome, make_core, make_request, run_to_completion
from penstock.types.events import Add
from penstock.types.request import Request
from support.parity.beam_cases import BeamCase
from support.parity.executors import ParityExecutor


def requests_of(case: BeamCase, number: int) -> list[Request]:
    requests = [
        make_request(
            f"{number}.{idx}",
            case.prompt_ids,
            max_tokens=case.max_tokens,
            beams=case.params,
            stop_token_ids=tuple(case.stop_ids),
            logprobs=case.width + len(case.stop_ids),
        )
        for idx in range(case.width)
    ]
    for request in requests:
        request.parent_id = str(number)
    return requests


def search(executor: ParityExecutor, cases: Sequence[BeamCase], *, together: bool = True) -> list[list[list[int]]]:
    """The hypotheses of each case; all searches run at once, or one after the other."""
    core = make_core(executor.capacity)
    requests = [requests_of(case, number) for number, case in enumerate(cases)]
    commands = [[Add(request) for request in group] for group in requests]
    outcomes: dict[str, Outcome] = {}
    for batch in [[command for group in commands for command in group]] if together else commands:
        outcomes |= run_to_completion(core, executor, *batch, after_turn=lambda driver: driver.core.check())
    return [[outcomes[request.request_id].token_ids for request in group] for group in requests]
