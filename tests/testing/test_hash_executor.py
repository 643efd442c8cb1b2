"""The fake must be strict, or it proves nothing: each of these wrongs would otherwise pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.testing import HashExecutor, HashModel, expected_tokens, make_request
from penstock.testing.hash_executor import mix
from penstock.types.errors import ExecutorFailure
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StateSave, StepPlan, Ticket
from penstock.types.request import FinishReason
from penstock.types.result import StepResult
from penstock.types.sampling import SamplingParams

CAPACITY = Capacity(num_blocks=12, block_size=4, max_rows=4, max_step_tokens=32, max_model_len=40)
GREEDY = SamplingParams(temperature=0.0)


class Device:
    """An executor and the number of the next step."""

    def __init__(self, capacity: Capacity = CAPACITY, *, depth: int = 1, seed: int = 0) -> None:
        self.executor = HashExecutor(capacity, depth=depth, seed=seed)
        self.num_steps = 0

    def step(
        self,
        *rows: RowPlan,
        admits: tuple[AdmitRow, ...] = (),
        releases: tuple[str, ...] = (),
        saves: tuple[StateSave, ...] = (),
    ) -> StepResult:
        plan = StepPlan(self.num_steps, 0, admits, rows, releases, saves)
        self.num_steps += 1
        return self.executor.collect(self.executor.submit(plan))


def admit(name: str, token_ids: list[int], block_ids: tuple[int, ...], num_computed: int = 0) -> AdmitRow:
    return AdmitRow(name, tuple(token_ids), len(token_ids), block_ids, num_computed, GREEDY)


@pytest.fixture
def device() -> Device:
    """Request "a" has computed six tokens in blocks 1 and 2."""
    device = Device()
    device.step(RowPlan("a", 0, 6, (), True), admits=(admit("a", [1, 2, 3, 4, 5, 6], (1, 2)),))
    return device


def test_a_claimed_hit_on_a_block_never_written_is_noticed(device: Device) -> None:
    with pytest.raises(AssertionError, match="never written"):
        device.step(RowPlan("b", 4, 1, (), True), admits=(admit("b", [1, 2, 3, 4, 5], (7, 3), 4),))


def test_a_block_given_to_two_rows_is_noticed(device: Device) -> None:
    with pytest.raises(AssertionError, match="while another row holds it"):
        device.step(RowPlan("b", 0, 2, (), True), admits=(admit("b", [1, 2], (2,)),))


def test_writing_to_a_shared_block_is_noticed(device: Device) -> None:
    with pytest.raises(AssertionError, match="others hold"):
        device.step(RowPlan("b", 6, 1, (), True), admits=(admit("b", [1, 2, 3, 4, 5, 6, 7], (1, 2), 6),))


def test_what_was_in_a_block_is_gone_when_it_is_given_out(device: Device) -> None:
    device.step(RowPlan("b", 0, 2, (), True), admits=(admit("b", [9, 9], (1,)),), releases=("a",))
    with pytest.raises(AssertionError, match="never written"):
        device.step(RowPlan("c", 4, 1, (), True), admits=(admit("c", [1, 2, 3, 4, 5], (1, 3), 4),), releases=("b",))


def test_a_hit_on_the_wrong_content_changes_the_answer(device: Device) -> None:
    right = device.step(RowPlan("b", 4, 1, (), True), admits=(admit("b", [1, 2, 3, 4, 5], (1, 3), 4),))
    wrong = device.step(RowPlan("c", 4, 1, (), True), admits=(admit("c", [2, 2, 3, 4, 5], (1, 4), 4),))
    expected = {
        name: expected_tokens(prompt, GREEDY, model=HashModel(), max_model_len=40).token_ids[:1]
        for name, prompt in (("b", [1, 2, 3, 4, 5]), ("c", [2, 2, 3, 4, 5]))
    }
    assert right.token_ids["b"] == expected["b"]
    assert wrong.token_ids["c"] != expected["c"]


@pytest.mark.parametrize("has_state", [False, True])
def test_with_state_going_on_inside_a_block_is_noticed(has_state: bool) -> None:
    """Behind its last computed position it is right, and so at the end of a block."""
    device = Device(replace(CAPACITY, has_state=has_state))
    device.step(RowPlan("a", 0, 7, (), True), admits=(admit("a", [1, 2, 3, 4, 5, 6, 7], (1, 2)),))
    device.executor.copy_blocks([(2, 3), (2, 4)])
    device.step(RowPlan("b", 4, 1, (), True), admits=(admit("b", [1, 2, 3, 4, 5], (1, 5), 4),))
    device.step(RowPlan("c", 7, 1, (), True), admits=(admit("c", [1, 2, 3, 4, 5, 6, 7, 8], (1, 3), 7),))
    inside = (RowPlan("d", 6, 1, (), True),)
    row = admit("d", [1, 2, 3, 4, 5, 6, 9], (1, 4), 6)
    if has_state:
        with pytest.raises(AssertionError, match="has the state after 3 positions, and 2 are wanted"):
            device.step(*inside, admits=(row,))
    else:
        device.step(*inside, admits=(row,))


class TestStates:
    """Rows have states of two blocks, beside the blocks of their keys."""

    PROMPT = (1, 2, 3, 4, 5)

    @pytest.fixture
    def device(self) -> Device:
        """Row `a` has computed all of its prompt, and its state after four tokens was saved to blocks 5 and 6."""
        device = Device(replace(CAPACITY, num_state_blocks=2))
        row = replace(admit("a", list(self.PROMPT), (1, 2)), state_block_ids=(3, 4))
        device.step(RowPlan("a", 0, 5, (), True), admits=(row,), saves=(StateSave("a", 4, (5, 6)),))
        return device

    def go_on(self, device: Device, **fields: object) -> int:
        row = replace(admit("b", list(self.PROMPT), (1, 7), 4), state_block_ids=(8, 9), state_source=(5, 6))
        return device.step(RowPlan("b", 4, 1, (), True), admits=(replace(row, **fields),), releases=("a",)).token_ids["b"][0]

    @pytest.mark.parametrize("own", [(8, 9), (5, 6)])
    def test_a_row_goes_on_from_a_saved_state(self, device: Device, own: tuple[int, ...]) -> None:
        expected = expected_tokens(self.PROMPT, GREEDY, model=HashModel(), max_model_len=40).token_ids[0]
        assert self.go_on(device, state_block_ids=own) == expected

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"state_source": (3, 4)}, "is not the one after 4 tokens"),
            ({"state_source": (5, 4)}, "hold no state"),
            ({"state_source": ()}, "a state is read from"),
            ({"state_block_ids": (8,)}, "a state of 2 blocks is put into"),
            ({"state_block_ids": (8, 6)}, "hold no state"),
            ({"state_block_ids": (7, 8)}, "is given out while another row holds it"),
        ],
    )
    def test_a_wrong_state_is_noticed(self, device: Device, fields: dict[str, tuple[int, ...]], message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            self.go_on(device, **fields)

    @pytest.mark.parametrize(
        ("save", "message"),
        [
            (StateSave("a", 5, (8, 9)), "of RowPlan"),
            (StateSave("a", 7, (8, 9)), "of RowPlan"),
            (StateSave("a", 6, (8,)), "a state is saved to"),
            (StateSave("a", 6, (8, 3)), "which a row holds"),
        ],
    )
    def test_a_wrong_save_is_noticed(self, device: Device, save: StateSave, message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            device.step(RowPlan("a", 5, 1, (), True), saves=(save,))


def test_a_copy_over_a_held_block_is_noticed(device: Device) -> None:
    device.executor.copy_blocks([(1, 2)])
    with pytest.raises(AssertionError, match="was overwritten"):
        device.step(RowPlan("a", 6, 1, (), True))


def test_sampling_before_a_row_has_caught_up_is_noticed(device: Device) -> None:
    with pytest.raises(AssertionError, match="exactly when it has caught up"):
        device.step(RowPlan("b", 0, 1, (), True), admits=(admit("b", [1, 2], (3,)),))


def test_not_sampling_when_a_row_has_caught_up_is_noticed(device: Device) -> None:
    with pytest.raises(AssertionError, match="exactly when it has caught up"):
        device.step(RowPlan("a", 6, 1, (), False))


def test_no_more_steps_are_in_flight_than_its_depth(device: Device) -> None:
    device.executor.submit(StepPlan(5, 0, (), (RowPlan("a", 6, 1, (), True),), ()))
    with pytest.raises(AssertionError, match="in flight already"):
        device.executor.submit(StepPlan(6, 0, (), (RowPlan("a", 7, 1, (), True),), ()))


def deep(seed: int) -> Device:
    """A step of "a", which has blocks 1 and 2, is in flight."""
    device = Device(depth=2, seed=seed)
    prompt = admit("a", [1, 2, 3, 4, 5, 6], (1, 2))
    device.executor.submit(StepPlan(0, 0, (prompt,), (RowPlan("a", 0, 6, (), True),), ()))
    return device


@pytest.mark.parametrize("seed", range(4))
def test_a_block_that_changes_hands_in_flight_is_noticed(seed: int) -> None:
    rows = (RowPlan("b", 0, 2, (), True),)
    with pytest.raises(AssertionError, match="changes hands while step 0 is in flight"):
        deep(seed).executor.submit(StepPlan(1, 0, (admit("b", [1, 2], (2,)),), rows, ("a",)))
    with pytest.raises(AssertionError, match="changes hands while step 0 is in flight"):
        deep(seed).executor.copy_blocks([(3, 2)])


@pytest.mark.parametrize("seed", range(4))
def test_contents_that_move_under_a_row_in_flight_are_noticed(seed: int) -> None:
    content = memoryview(bytearray(deep(seed).executor.block_bytes))
    with pytest.raises(AssertionError, match="block 2 is written while step 0 is in flight"):
        deep(seed).executor.write_blocks([3, 2], [content, content])
    with pytest.raises(AssertionError, match="block 1 is read while step 0 is in flight"):
        deep(seed).executor.read_blocks([1], [content])


def test_with_a_depth_of_one_contents_move_between_steps(device: Device) -> None:
    device.executor.submit(StepPlan(5, 0, (), (RowPlan("a", 6, 1, (), True),), ()))
    for move in (device.executor.read_blocks, device.executor.write_blocks):
        with pytest.raises(AssertionError, match="during a step"):
            move([], [])


@pytest.mark.parametrize("seed", range(4))
def test_a_row_that_is_released_while_its_step_is_in_flight_is_computed(seed: int) -> None:
    device = deep(seed)
    ticket = device.executor.submit(StepPlan(1, 0, (admit("a", [9], (3,)),), (RowPlan("a", 0, 1, (), True),), ("a",)))
    told = device.executor.collect(Ticket(0)).token_ids["a"], device.executor.collect(ticket).token_ids["a"]
    model = HashModel()
    assert told == tuple(
        expected_tokens(prompt, GREEDY, model=model, max_model_len=40).token_ids[:1] for prompt in ([1, 2, 3, 4, 5, 6], [9])
    )


def test_results_are_collected_in_the_order_of_submission() -> None:
    device = Device(depth=2)
    for step_id in (5, 6):
        prompt = admit(f"r{step_id}", [1], (step_id,))
        device.executor.submit(StepPlan(step_id, 0, (prompt,), (RowPlan(f"r{step_id}", 0, 1, (), True),), ()))
    with pytest.raises(AssertionError, match="order of submission"):
        device.executor.collect(Ticket(6))
    assert device.executor.collect(Ticket(5)).step_id == 5


def test_a_closed_executor_has_failed(device: Device) -> None:
    device.executor.close()
    with pytest.raises(ExecutorFailure):
        device.step(RowPlan("a", 6, 1, (), True))


def test_the_hash_depends_on_order() -> None:
    assert mix(mix(0, 1), 2) != mix(mix(0, 2), 1)
    assert mix(1, 2) != mix(2, 1)


def test_tokens_are_drawn_from_the_range_asked_for() -> None:
    model = HashModel(vocab_size=12, first_token_id=5)
    request = make_request(max_tokens=200)
    drawn = expected_tokens(request.prompt_token_ids, request.sampling, model=model, max_model_len=1000).token_ids
    assert set(drawn) == set(range(5, 12))


def test_the_end_token_comes_about_once_in_a_period() -> None:
    model = HashModel(eos_token_id=3, eos_period=10)
    request = make_request(max_tokens=2000)
    drawn = expected_tokens(request.prompt_token_ids, request.sampling, model=model, max_model_len=10**6).token_ids
    assert 120 < drawn.count(3) < 280


def test_the_oracle_stops_for_the_same_reasons() -> None:
    model = HashModel(eos_token_id=3, eos_period=2)
    sampling = SamplingParams(temperature=0.0, max_tokens=100, min_tokens=4, stop_token_ids=(3,))
    stopped = expected_tokens([1, 2], sampling, model=model, max_model_len=1000)
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, 3)
    assert len(stopped.token_ids) > 4
    cut = expected_tokens([1, 2], sampling, model=model, max_model_len=5)
    assert (cut.finish_reason, len(cut.token_ids)) == (FinishReason.LENGTH, 3)


def test_a_model_needs_two_tokens_to_draw_from() -> None:
    with pytest.raises(ValueError, match="at least two tokens"):
        HashModel(vocab_size=5, first_token_id=4)


class TestWindows:
    """Request "a" has computed twelve tokens in blocks 1 to 3, of which position 12 reads the last four."""

    TOKENS = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)

    @pytest.fixture
    def windowed(self) -> Device:
        device = Device(replace(CAPACITY, window=5))
        device.step(RowPlan("a", 0, 12, (), True), admits=(admit("a", [*self.TOKENS], (1, 2, 3)),))
        return device

    def test_a_block_before_the_window_may_be_given_to_others(self, windowed: Device) -> None:
        windowed.step(
            RowPlan("a", 12, 1, (4,), True), RowPlan("b", 0, 6, (), True), admits=(admit("b", [1, 2, 3, 4, 5, 6], (1, 2)),)
        )
        assert windowed.step(RowPlan("a", 13, 1, (), True)).token_ids["a"]

    def test_or_to_the_same_row(self, windowed: Device) -> None:
        assert windowed.step(RowPlan("a", 12, 1, (1,), True)).token_ids["a"]

    def test_a_block_within_it_may_not(self, windowed: Device) -> None:
        with pytest.raises(AssertionError, match="while another row holds it"):
            windowed.step(RowPlan("b", 0, 2, (), True), admits=(admit("b", [1, 2], (3,)),))

    @pytest.mark.parametrize(("third", "words"), [(7, "never written"), (8, "another row's")])
    def test_wrong_content_anywhere_in_the_window_is_noticed(self, windowed: Device, third: int, words: str) -> None:
        """A hit of twelve tokens, the last three of which are right."""
        windowed.executor.copy_blocks([(3, 8)])
        size = CAPACITY.block_size
        windowed.executor._slots[8 * size] += 1
        with pytest.raises(AssertionError, match=words):
            windowed.step(RowPlan("b", 12, 1, (), True), admits=(admit("b", [*self.TOKENS, 17], (0, 0, third, 9), 12),))

    def test_null_blocks_stand_for_what_lies_before_it(self, windowed: Device) -> None:
        row = RowPlan("b", 12, 1, (), True)
        assert windowed.step(row, admits=(admit("b", [*self.TOKENS, 17], (0, 0, 3, 9), 12),)).token_ids["b"]

    def test_and_for_nothing_else(self, windowed: Device) -> None:
        with pytest.raises(AssertionError, match="null block"):
            windowed.step(RowPlan("b", 11, 1, (), True), admits=(admit("b", [*self.TOKENS], (0, 0, 9), 11),))

    def test_a_step_in_flight_still_reads_its_own_window(self) -> None:
        device = Device(replace(CAPACITY, window=5), depth=2, seed=1)
        device.step(RowPlan("a", 0, 11, (), False), admits=(admit("a", [*self.TOKENS], (1, 2, 3)),))
        first = device.executor.submit(StepPlan(5, 0, (), (RowPlan("a", 11, 1, (), True),), ()))
        with pytest.raises(AssertionError, match="while step 5 is in flight"):
            device.executor.submit(StepPlan(6, 0, (admit("b", [1, 2], (2,)),), (RowPlan("b", 0, 2, (), True),), ()))
        assert device.executor.collect(first).token_ids["a"]
