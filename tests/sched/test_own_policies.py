"""Policies of a user's own: how they are found, what is said when they are wrong, and the guard around them while they run."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.sched.policies.base import GateDecision, Guess, Order, StepLimits
from penstock.sched.policies.own import OwnPolicyError
from penstock.sched.policies.presets import make_policies
from penstock.testing import HashExecutor, expected_tokens, make_core, make_request, run_to_completion
from penstock.types.errors import ConfigError, PolicyError
from penstock.types.events import Add
from penstock.types.plan import Capacity
from penstock.types.request import FinishReason

FILE = """
from dataclasses import dataclass

from penstock.sched.policies.base import Order, Victim


@dataclass(frozen=True, slots=True)
class ShortPromptsFirst(Order):
    delay_per_token_ns: int = 1_000_000
    share: float = 1.0
    names: tuple[str, ...] = ()

    def key(self, request, now_ns):
        return (request.arrival_ns + request.num_prompt_tokens * self.delay_per_token_ns,)


class Picky:
    def __init__(self, limit: int, *, note: str = "none"):
        if limit < 0:
            raise ValueError("limit is below 0")

    def key(self, request, now_ns):
        return (request.arrival_ns,)


class Empty(Order):
    pass


class Bare:
    pass


class ShortKey:
    def key(self, request):
        return (0,)


class Failing(ShortPromptsFirst):
    def key(self, request, now_ns):
        return self.helper()

    def helper(self):
        return 1 // 0


class Chooser(Victim):
    def choose(self, view):
        return None


class Misspelt(Order):
    is_preemptiv = True

    def key(self, request, now_ns):
        return (0,)

    def lanekey(self, lane):
        return (0,)


class Unasked(Order):
    def key(self, request, now_ns):
        return (0,)

    def outranks(self, request, other, now_ns):
        return True
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own_orders.py"
    path.write_text(FILE)
    return str(path)


def ends(policies) -> list[str]:
    executor = HashExecutor()
    core = make_core(executor.capacity, policies, max_rows=1)
    requests = [make_request("long", 60, max_tokens=4), make_request("short", 5, max_tokens=4)]
    outcomes = run_to_completion(core, executor, *(Add(request) for request in requests))
    return sorted(outcomes, key=lambda request_id: outcomes[request_id].last.at_ns)


class TestLoading:
    def test_a_class_of_a_file_orders_the_queue(self, file: str):
        assert ends(make_policies(order=f"{file}:ShortPromptsFirst")) == ["short", "long"]

    def test_a_class_of_a_module_is_found_where_python_looks(self, file: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.syspath_prepend(str(Path(file).parent))
        assert ends(make_policies(order="own_orders:ShortPromptsFirst")) == ["short", "long"]

    def test_arguments_are_those_of_the_constructor(self, file: str):
        arguments = {"order": {"delay_per_token_ns": 0, "share": 2, "names": ["a", "b"]}}
        policies = make_policies(order=f"{file}:ShortPromptsFirst", arguments=arguments)
        assert ends(policies) == ["long", "short"]
        order = policies.order
        assert (order.delay_per_token_ns, order.share, order.names) == (0, 2.0, ("a", "b"))

    def test_a_policy_that_ships_takes_arguments_too(self):
        assert make_policies(order="fair", arguments={"order": {"shares": {"a": 3}}}).order._shares == {"a": 3}
        assert make_policies(gate="dynamic", arguments={"gate": {"length_buckets": [64]}}).gate.length_buckets == (64,)

    def test_a_file_is_loaded_once(self, file: str):
        first, second = (make_policies(order=f"{file}:ShortPromptsFirst").order for _ in range(2))
        assert first._policy == second._policy, "of one class"

    @pytest.mark.parametrize(
        ("name", "arguments", "says"),
        [
            (":Short", {}, "is not the name of a class. Write package.module:Class"),
            ("FILE:", {}, "is not the name of a class."),
            ("FILE.x.py:Short", {}, "there is no file "),
            ("no_such_module_here:Short", {}, "there is no module no_such_module_here .* PYTHONPATH"),
            ("FILE:ShortPromptFirst", {}, "has no class ShortPromptFirst. Did you mean ShortPromptsFirst"),
            ("FILE:ShortPromptsFirst", {"dely": 1}, r"takes no argument dely. It takes: delay_per_token_ns = 1000000, share"),
            ("FILE:ShortPromptsFirst", {"delay_per_token_ns": "1"}, "takes int for delay_per_token_ns, not str"),
            ("FILE:ShortPromptsFirst", {"delay_per_token_ns": True}, "takes int for delay_per_token_ns, not bool"),
            ("FILE:Picky", {}, "needs the argument limit, which is not given. It takes: limit, note = 'none'"),
            ("FILE:Picky", {"limit": 1.5}, "takes int for limit, not float"),
            ("FILE:Picky", {"limit": -1}, "can't be made of its arguments: ValueError: limit is below 0"),
            (
                "FILE:Empty",
                {},
                r"has no method key, .* Define it as key\(self, request, now_ns\), as penstock.sched.policies.base.Order",
            ),
            ("FILE:Bare", {}, "has no method key"),
            ("FILE:Chooser", {}, "its class inherits from Victim. Use --victim; in Python, victim="),
            ("./a/.././none.py:Short", {}, "there is no file (/[^/.]+)+/none.py"),
            ("FILE:ShortKey", {}, r"method key that does not take .* Define it as key\(self, request, now_ns\)"),
            ("FILE:Unasked", {}, "outranks, but it is never called. Say has_ranks = True"),
            ("fair", {"weight": 1}, "The order 'fair' takes no argument weight. It takes: input_weight = 1"),
        ],
    )
    def test_an_error_names_cause_and_remedy(self, file: str, name: str, arguments: dict[str, object], says: str):
        with pytest.raises(OwnPolicyError, match=says):
            make_policies(order=name.replace("FILE", file), arguments={"order": arguments})

    def test_a_name_that_looks_like_a_misspelt_one_is_a_warning(self, file: str):
        with pytest.warns(UserWarning, match="never used. Did you mean") as caught:
            make_policies(order=f"{file}:Misspelt")
        said = [str(one.message).partition(" has ")[2] for one in caught]
        assert said == [
            "is_preemptiv, which is never used. Did you mean is_preemptive?",
            "lanekey, which is never used. Did you mean lane_key?",
        ]

    def test_arguments_of_no_seam_list_those_that_there_are(self):
        with pytest.raises(ConfigError, match=r"no seam called 'policy'. Valid: budget, eviction, gate, guesser, order"):
            make_policies(arguments={"policy": {"x": 1}})

    def test_what_was_chosen_is_said_in_words(self, file: str):
        words = make_policies("vllm", order=f"{file}:ShortPromptsFirst", arguments={"order": {"share": 2}}).words
        assert words["order"] == f"{file}:ShortPromptsFirst (share = 2)"
        assert words["budget"] == "decode-first"

    @pytest.mark.parametrize(("text", "says"), [("import no_such_thing\n", "no_such_thing"), ("def (\n", "SyntaxError")])
    def test_a_file_that_can_not_be_loaded_says_why(self, tmp_path: Path, text: str, says: str):
        path = tmp_path / "broken.py"
        path.write_text(text)
        for _ in range(2):  # nothing of the first attempt is left
            with pytest.raises(OwnPolicyError, match=rf"can't be loaded: .*{says}"):
                make_policies(order=f"{path}:Order")
        assert not [name for name in sys.modules if str(path) in name]

    def test_a_name_that_is_in_no_table_lists_those_that_are(self):
        with pytest.raises(ConfigError, match=r"no order called 'lifo'. Valid: calls, edf, fair, .*package.module:Class"):
            make_policies(order="lifo")


class TestDefaults:
    """A class that declares nothing but what it decides behaves safely."""

    def test_a_gate_takes_half_of_the_rows_and_is_not_planned_ahead(self):
        class Shy:
            def decide(self, view):
                return GateDecision(max_admissions=1)

        gate = make_policies(gate=Shy()).gate
        assert (gate.is_continuous, gate.may_plan_ahead, gate.bucket_of(make_request("a", 3))) == (False, False, 0)
        assert gate.max_running(Capacity(9, 4, max_rows=8, max_step_tokens=64, max_model_len=32)) == 4

    def test_a_gate_may_close_without_a_time_while_a_request_runs(self):
        gate = answers("decide", lambda view: GateDecision(0 if view.num_running + view.num_joining else 1))
        assert run(make_policies(gate=gate)) == run(make_policies())

    def test_a_gate_that_is_continuous_takes_all_rows_and_beams(self):
        class Open:
            is_continuous = True

            def decide(self, view):
                return GateDecision(max_admissions=1)

        executor = HashExecutor()
        core = make_core(executor.capacity, make_policies(gate=Open()))
        assert core.scheduler.max_rows == executor.capacity.max_rows
        assert core.scheduler._is_continuous

    def test_an_order_is_not_asked_for_ranks(self):
        class Arrival:
            def key(self, request, now_ns):
                return (request.arrival_ns,)

        order = make_policies(order=Arrival()).order
        assert (order.has_ranks, order.is_preemptive, order.reads_priority) == (False, False, False)
        assert order.lane(make_request("a", 3)) == ""

    def test_one_that_ships_is_called_directly(self):
        policies = make_policies()
        assert type(policies.order).__module__ == "penstock.sched.policies.orders"


def run(policies, **options) -> dict[str, list[int]]:
    capacity = replace(HashExecutor().capacity, **options)
    executor = HashExecutor(capacity)
    core = make_core(executor.capacity, policies)
    requests = [make_request(name, 8, max_tokens=20) for name in "abc"]
    run_to_completion(core, executor, *(Add(request) for request in requests))
    return {request.request_id: list(request.output_token_ids) for request in requests}


class Raises:
    def key(self, request, now_ns):
        raise ZeroDivisionError("of nothing")


def answers(method: str, answer: Callable[..., object], **flags: object) -> object:
    """A policy with one method."""

    def call(self, *arguments: object) -> object:
        return answer(*arguments)

    namespace: dict[str, object] = {method: call, "group_of": lambda self, request: "g", **flags}
    return type("Own", (), namespace)()


TIGHT = {"num_blocks": 13, "block_size": 4, "max_model_len": 40}


class TestGuard:
    def test_what_a_policy_raises_names_it(self):
        with pytest.raises(PolicyError, match=r"order '.*:Raises' failed in key: ZeroDivisionError: of nothing") as caught:
            run(make_policies(order=Raises()))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_what_a_policy_raises_names_the_line_of_its_file(self, file: str):
        line = FILE.splitlines().index("        return 1 // 0") + 1
        with pytest.raises(PolicyError, match=rf"failed in key: ZeroDivisionError: .* \({file}, line {line}\)"):
            run(make_policies(order=f"{file}:Failing"))

    @pytest.mark.parametrize(
        ("method", "says"),
        [("key", "must not shrink while the request waits"), ("lane_key", "must not shrink while a request of the lane waits")],
    )
    def test_a_key_that_shrinks_while_a_request_waits_names_the_policy(self, method: str, says: str):
        keys = iter(range(0, -99, -1))
        others = {"key": lambda self, request, now_ns: (0,), "lane": lambda self, request: request.request_id}
        policy = type("Own", (), {**others, method: lambda self, *arguments: (next(keys),)})()
        with pytest.raises(PolicyError, match=rf"Own' returned .* from {method}, .* {says}"):
            run(make_policies(order=policy), max_rows=1)

    def test_ranks_in_a_circle_name_the_policy(self):
        key = {"key": lambda self, request, now_ns: (0,)}
        order = answers("outranks", lambda request, other, now_ns: True, has_ranks=True, **key)
        with pytest.raises(PolicyError, match=r"order '.*Own' returned True from outranks in a circle"):
            run(make_policies(order=order), max_rows=3, max_step_tokens=4)

    def test_a_key_may_shrink_once_the_request_has_waited(self):
        """A lane that is empty for a while begins anew, as does the key of a request that was preempted."""

        class Anew(Order):
            num_asked = 0

            def lane(self, request):
                return request.tenant

            def lane_key(self, lane):
                self.num_asked += 1
                return (self.num_asked,)

            def left(self, request):
                self.num_asked = 0

            def key(self, request, now_ns):
                return (-request.num_tokens,)

        order = make_policies(order=Anew()).order
        for num_tokens in (3, 4):
            request = make_request("a", num_tokens, tenant="t")
            order.queued(request)
            assert [order.lane(request), order.lane_key("t"), order.key(request, 0)] == ["t", (1,), (-num_tokens,)]
            order.unqueued(request)
            order.left(request)

    @pytest.mark.parametrize(
        ("seam", "policy", "says"),
        [
            ("order", answers("key", lambda request, now_ns: 7), "order .* returned 7 from key, but must return a tuple"),
            ("order", answers("key", lambda request, now_ns: (0, None)), "must return a tuple of numbers"),
            ("order", answers("key", lambda request, now_ns: (float("nan"),)), "must return a tuple of numbers"),
            ("order", answers("lane_key", lambda lane: (lane,), key=lambda self, request, now_ns: (0,)), "tuple of numbers"),
            ("gate", answers("decide", lambda view: None), "gate .* returned None from decide, but must return a GateDecision"),
            ("gate", answers("decide", lambda view: GateDecision(1, bucket=5)), r"must return a bucket of the view, \[0\]"),
            ("gate", answers("decide", lambda view: GateDecision(0, view.now_ns)), "must return a wakeup_ns after now"),
            (
                "gate",
                answers("decide", lambda view: GateDecision(0)),
                "a wakeup_ns, since no request of these runs",
            ),
            ("gate", answers("decide", lambda view: GateDecision(1, is_batch=True), is_continuous=True), "but must not, since"),
            ("gate", answers("decide", lambda view: GateDecision(view.max_rows + 1, is_batch=True)), "a batch of at most"),
            ("budget", answers("limits", lambda view: None), "budget .* must return StepLimits"),
            ("budget", answers("limits", lambda view: StepLimits(0)), "must return max_tokens from 1 to"),
            ("budget", answers("limits", lambda view: StepLimits(9999)), "must return max_tokens from 1 to"),
            ("budget", answers("limits", lambda view: StepLimits(view.max_step_tokens, 0)), "max_chunk_tokens"),
            (
                "budget",
                answers("limits", lambda view: StepLimits(view.max_step_tokens, most_ns=float("nan"))),
                "most_ns above 0",
            ),
            ("budget", answers("limits", lambda view: StepLimits(view.max_step_tokens, most_ns=0)), "a most_ns above 0"),
            ("budget", answers("limits", lambda view: StepLimits(9, 9 / 3)), "must return whole numbers of tokens"),
            ("budget", answers("limits", lambda view: StepLimits(9, long_prefill_share=2.0)), "must return whole numbers"),
            ("budget", answers("limits", lambda view: StepLimits(9, decode_tokens=0)), "a finite decode_tokens above 0"),
            ("budget", answers("limits", lambda view: StepLimits(9, decode_tokens=math.inf)), "a finite decode_tokens above 0"),
            ("reserve", answers("required_blocks", lambda view: "1"), "reserve .* must return a whole number of blocks"),
            ("predictor", answers("predict", lambda request: 0.5), "predictor .* must return a number of tokens"),
            ("victim", answers("choose", lambda view: None), "must return one of the candidates"),
            (
                "victim",
                answers("choose", lambda view: make_request("z", 2)),
                "something of type Request .* one of the candidates",
            ),
        ],
    )
    def test_an_answer_that_would_break_the_scheduler_names_the_policy(self, seam: str, policy: object, says: str):
        with pytest.raises(PolicyError, match=says):
            run(make_policies(**{"reserve": "chunk", seam: policy}), **TIGHT)

    def test_an_eviction_names_a_group_that_has_blocks(self):
        policy = answers("choose", lambda: "none")
        capacity = replace(HashExecutor().capacity, **TIGHT)
        core, executor = make_core(capacity, make_policies(eviction=policy)), HashExecutor(capacity)
        for token in (1, 2):
            run_to_completion(core, executor, Add(make_request(str(token), [token] * 16, max_tokens=1)))
        third = Add(make_request("3", [3] * 32, max_tokens=1))
        with pytest.raises(PolicyError, match=r"eviction .* returned 'none' from choose, .* a group that has blocks"):
            run_to_completion(core, executor, third)

    def test_an_eviction_need_not_look_at_sizes(self):
        class ByTenant:
            def group_of(self, request):
                return request.tenant

            def choose(self):
                return "light"

        capacity = replace(HashExecutor().capacity, **TIGHT)
        core, executor = make_core(capacity, make_policies(eviction=ByTenant())), HashExecutor(capacity)
        first, again = make_request("1", [1] * 16, max_tokens=1, tenant="light"), make_request("4", [3] * 16, max_tokens=1)
        others = [make_request("2", [2] * 16, max_tokens=1, tenant="heavy"), make_request("3", [3] * 24, max_tokens=1)]
        for request in (first, *others, again):
            run_to_completion(core, executor, Add(request))
        assert again.num_cached_tokens, "blocks of others were given up"

    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            (lambda: Guess([5, 1000], 9), "returned the token 1000 from guess, but must return tokens from 0 to 999"),
            (lambda: Guess([-7], 9), "returned the token -7 from guess"),
            (lambda: [5], "returned something of type list from guess, but must return a Guess"),
            (lambda: 1 // 0, "failed in guess: ZeroDivisionError"),
        ],
    )
    def test_a_guesser_that_fails_is_named_and_asked_no_more_and_harms_no_request(self, answer, says: str, caplog):
        num_asked = 0

        class Wrong:
            def guess(self, request, most):
                nonlocal num_asked
                num_asked += 1
                return answer()

        outputs = run(make_policies(guesser=Wrong()), checks_guesses=True, max_scored=60)
        assert outputs == run(make_policies(guesser="off"))
        assert num_asked == 1
        [record] = [record for record in caplog.records if record.name == "penstock.engine.core"]
        assert record.exc_info is not None
        assert re.search(rf"guesser '.*Wrong' {says}", str(record.exc_info[1]))

    def test_a_guesser_that_fails_at_the_end_of_a_request_harms_no_other(self, caplog):
        class Wrong:
            def guess(self, request, most):
                return None

            def ended(self, request):
                raise KeyError(request.request_id)

        executor = HashExecutor(replace(HashExecutor().capacity, checks_guesses=True, max_scored=60))
        core = make_core(executor.capacity, make_policies(guesser=Wrong()))
        requests = [make_request(name, 8, max_tokens=num) for name, num in (("a", 5), ("b", 20))]
        outcomes = run_to_completion(core, executor, *map(Add, requests))
        assert [outcomes[name].finish_reason for name in "ab"] == [FinishReason.LENGTH] * 2
        assert "failed in ended: KeyError" in caplog.text

    def test_a_guesser_may_call_its_texts_a_source(self):
        class Texts:
            def __init__(self):
                self.source = ["a text", "another"]

            def guess(self, request, most):
                return Guess([7], 9) if most else None

        assert make_policies(guesser=Texts()).guesser.source == "own", "a label of metrics"

    def test_max_running_is_within_the_capacity(self):
        policy = type("Own", (), {"max_running": lambda self, capacity: 999, "decide": lambda self, view: GateDecision(1)})()
        with pytest.raises(PolicyError, match="returned 999 from max_running, but must return a number of requests from 1 to"):
            run(make_policies(gate=policy))

    def test_behind_the_guard_answers_are_those_of_the_model(self):
        class Own(Order):
            def key(self, request, now_ns):
                return (-request.arrival_ns,)

        outputs = run(make_policies(order=Own()), **TIGHT)
        requests = [make_request(name, 8, max_tokens=20) for name in "abc"]
        for one in requests:
            expected = expected_tokens(one.prompt_token_ids, one.sampling, model=HashExecutor().model, max_model_len=40)
            assert outputs[one.request_id] == list(expected.token_ids)
