"""When batches start, who is in them, and when the gate wants to be asked again."""

from __future__ import annotations

import pytest

from penstock.sched.policies.base import BucketView, GateDecision, GateView
from penstock.sched.policies.gates import Continuous, Dynamic, Static
from penstock.testing import make_request
from penstock.testing.hash_executor import DEFAULT_CAPACITY
from penstock.types.errors import ConfigError
from penstock.types.plan import Capacity

MS = 1_000_000


def view(*buckets: BucketView, now_ns: int = 0, running: int = 0, joining: int = 0, max_rows: int = 8) -> GateView:
    return GateView(now_ns, running, joining, max_rows, buckets)


def capacity(max_rows: int, max_step_tokens: int = 512) -> Capacity:
    return Capacity(num_blocks=100, block_size=16, max_rows=max_rows, max_step_tokens=max_step_tokens, max_model_len=1000)


class TestContinuous:
    def test_it_is_always_open(self) -> None:
        decision = Continuous().decide(view(BucketView(0, 9, 0), running=3))
        assert (decision.max_admissions, decision.wakeup_ns, decision.is_batch) == (8, None, False)

    def test_every_row_and_every_token_of_a_step_can_be_a_decode(self) -> None:
        assert Continuous().max_running(capacity(8)) == 8
        assert Continuous().max_running(capacity(8, 4)) == 4


class TestStatic:
    def test_a_full_batch_starts_at_once(self) -> None:
        assert Static(8, 100 * MS).decide(view(BucketView(0, 9, 0))) == GateDecision(8, is_batch=True)

    def test_an_incomplete_batch_waits_for_the_delay_and_no_longer(self) -> None:
        gate, waiting = Static(8, 100 * MS), BucketView(0, 7, oldest_ns=5 * MS)
        assert gate.decide(view(waiting, now_ns=104 * MS)) == GateDecision(0, wakeup_ns=105 * MS)
        assert gate.decide(view(waiting, now_ns=105 * MS)) == GateDecision(8, is_batch=True)

    @pytest.mark.parametrize("who", [{"running": 1}, {"joining": 1}])
    def test_nobody_joins_a_batch_that_runs(self, who: dict[str, int]) -> None:
        assert Static(8, 0).decide(view(BucketView(0, 99, 0), now_ns=MS, **who)) == GateDecision(0)


class TestDynamic:
    def test_prompts_wait_in_the_smallest_bucket_that_holds_them(self) -> None:
        gate = Dynamic(length_buckets=(128, 512))
        assert [gate.bucket_of(make_request(prompt=length)) for length in (1, 128, 129, 512, 513)] == [0, 0, 1, 1, 2]

    def test_a_full_batch_starts_at_once_and_is_padded_to_its_bucket(self) -> None:
        decision = Dynamic(length_buckets=(128, 512)).decide(view(BucketView(1, 8, 0)))
        assert decision == GateDecision(8, bucket=1, is_batch=True, pad_to_tokens=512)

    def test_prompts_beyond_the_last_bucket_are_padded_to_the_longest_of_them(self) -> None:
        assert Dynamic(length_buckets=(128,)).decide(view(BucketView(1, 8, 0))).pad_to_tokens == 0

    def test_the_largest_preferred_size_starts_at_once(self) -> None:
        gate = Dynamic(preferred_batch_sizes=(2, 4))
        assert gate.decide(view(BucketView(0, 1, 0))).max_admissions == 0
        assert gate.decide(view(BucketView(0, 3, 0))).max_admissions == 2
        assert gate.decide(view(BucketView(0, 7, 0))).max_admissions == 4
        assert gate.decide(view(BucketView(0, 9, 0))).max_admissions == 8

    def test_what_there_is_starts_when_the_oldest_has_waited_the_window(self) -> None:
        gate = Dynamic(preferred_batch_sizes=(2,), max_queue_delay_ns=20 * MS)
        late, early = BucketView(0, 1, oldest_ns=7 * MS), BucketView(2, 1, oldest_ns=4 * MS)
        assert gate.decide(view(late, early, now_ns=23 * MS)) == GateDecision(0, wakeup_ns=24 * MS)
        assert gate.decide(view(late, early, now_ns=24 * MS)).bucket == 2
        assert gate.decide(view(BucketView(0, 7, oldest_ns=0), now_ns=20 * MS)).max_admissions == 7, "preferred or not"

    def test_of_those_that_may_start_the_one_that_waits_longest_does(self) -> None:
        """So a bucket that is always full delays another by the batch that runs, and no more."""
        full, lone = BucketView(0, 99, oldest_ns=9 * MS), BucketView(3, 1, oldest_ns=8 * MS)
        gate = Dynamic(max_queue_delay_ns=20 * MS)
        assert gate.decide(view(full, lone, now_ns=27 * MS)).bucket == 0
        assert gate.decide(view(full, lone, now_ns=28 * MS)).bucket == 3

    def test_nobody_joins_a_batch_that_runs(self) -> None:
        assert Dynamic().decide(view(BucketView(0, 99, 0), now_ns=MS, running=1)) == GateDecision(0)

    def test_buckets_ascend(self) -> None:
        with pytest.raises(ConfigError, match=r"\(512, 128\) do not ascend"):
            Dynamic(length_buckets=(512, 128))

    def test_preferred_sizes_are_sizes_of_batches(self) -> None:
        with pytest.raises(ConfigError, match=r"\(4, 16\) are not all within 8.*--max-batch-size"):
            Dynamic(max_batch_size=8, preferred_batch_sizes=(4, 16))


@pytest.mark.parametrize("make", [Static, Dynamic])
class TestRows:
    def test_half_of_the_rows_are_left_for_padding(self, make: type[Static | Dynamic]) -> None:
        assert make().max_running(DEFAULT_CAPACITY) == DEFAULT_CAPACITY.max_rows // 2
        assert make(5).max_running(capacity(10)) == 5
        assert make().max_running(capacity(64, max_step_tokens=4)) == 4

    def test_a_batch_that_is_too_large_is_refused_with_a_remedy(self, make: type[Static | Dynamic]) -> None:
        with pytest.raises(ConfigError, match=r"batch of 6 needs 12 rows.*--max-num-seqs to 12 .* --max-batch-size to 5 "):
            make(6).max_running(capacity(10))
        with pytest.raises(ConfigError, match=r"the server has 1 row and .*--max-num-seqs to 2"):
            make().max_running(capacity(1))
