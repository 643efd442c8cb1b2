"""The promises of every executor. Only tokens are compared, so the suite holds for hashes and for models alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from penstock.engine.ports import BlockMover
from penstock.testing import Outcome
from penstock.types.plan import PaddingId, RowPlan, StepPlan
from penstock.types.request import Request
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import BeamParams, SamplingParams
from support.contracts.harness import GREEDY, MAX_BLOCKS_PER_ROW, MAX_ROWS, PADDED, Feed, Harness, admit, mask_of, request
from support.hash_matcher import HashMatcher

BROKEN = (ValueError, AssertionError)
PADDING = PaddingId("padding")


def read_blocks(blocks: BlockMover, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
    """And wait until they are there."""
    ready = blocks.read_blocks(block_ids, out)
    if ready is not None:
        ready()


def entries_of(outcome: Outcome) -> list[TokenLogprobs]:
    return [entry for event in outcome.events for entry in event.logprobs]


class TestAnswers:
    """The answer is a function of the prompt and the sampling parameters alone."""

    def test_the_same_request_gets_the_same_answer(self, harness: Harness) -> None:
        prompt = harness.prompt(2 * harness.block_size + 1)
        assert harness.answer(prompt) == harness.answer(prompt)

    def test_prompts_of_one_token_are_answered(self, harness: Harness) -> None:
        assert len(harness.answer(harness.prompt(1))) == GREEDY.max_tokens

    @pytest.mark.parametrize("chunk", [1, 3, 7])
    def test_chunked_is_whole(self, harness: Harness, chunk: int) -> None:
        prompt = harness.prompt(4 * harness.block_size + 2)
        (outcome,) = harness.run(request("r", prompt), max_step_tokens=chunk)
        assert outcome.token_ids == harness.answer(prompt)

    def test_batch_of_one_is_batch_of_many(self, harness: Harness) -> None:
        prompts = [harness.prompt(1 + idx * harness.block_size * 2 // 3, seed=idx + 1) for idx in range(MAX_ROWS)]
        outcomes = harness.run(*(request(f"r{idx}", prompt) for idx, prompt in enumerate(prompts)))
        assert [outcome.token_ids for outcome in outcomes] == [harness.answer(prompt) for prompt in prompts]

    def test_decodes_beside_a_chunked_prompt_are_decodes_alone(self, harness: Harness) -> None:
        short, long = harness.prompt(3, seed=1), harness.prompt(5 * harness.block_size, seed=2)
        requests = request("short", short, max_tokens=harness.block_size * 3), request("long", long, arrival_ns=1)
        outcomes = harness.run(*requests, max_step_tokens=5)
        assert outcomes[0].token_ids == harness.answer(short, max_tokens=harness.block_size * 3)
        assert outcomes[1].token_ids == harness.answer(long)

    def test_hit_is_miss(self, harness: Harness) -> None:
        prompt = harness.prompt(3 * harness.block_size + 1)
        executor = harness.make()
        requests = request("first", prompt), request("second", prompt, arrival_ns=1)
        outcomes = harness.run(*requests, executor=executor, caching=True, max_rows=1)
        assert [outcome.last.num_cached_tokens for outcome in outcomes] == [0, 3 * harness.block_size]
        assert outcomes[0].token_ids == outcomes[1].token_ids == harness.answer(prompt)

    @pytest.mark.parametrize(("num_blocks", "num_tokens"), [(0, 1), (0, -1), (1, 1), (1, 3), (1, -1)])
    def test_a_hit_inside_a_block_is_a_miss(self, harness: Harness, num_blocks: int, num_tokens: int) -> None:
        """A block that begins alike is copied; log-probabilities are those of computing it all."""
        num_common = num_blocks * harness.block_size + num_tokens % harness.block_size
        first = harness.prompt(2 * harness.block_size)
        second = (*first[:num_common], *harness.prompt(9, seed=2))
        executor = harness.make()
        requests = request("a", first, logprobs=3), request("b", second, arrival_ns=1, logprobs=3)
        shared = harness.run(*requests, executor=executor, caching=True, max_rows=1)
        assert requests[1].num_cached_tokens == num_common
        for outcome, prompt in zip(shared, (first, second), strict=True):
            (alone,) = harness.run(request("alone", prompt, logprobs=3))
            assert outcome.token_ids == alone.token_ids
            assert entries_of(outcome) == entries_of(alone)

    def test_choices_that_share_their_prompt_answer_as_if_alone(self, harness: Harness) -> None:
        prompt = harness.prompt(harness.block_size + 11)
        choices = [request(f"r{seed}", prompt, temperature=1.0, seed=seed) for seed in range(3)]
        outcomes = harness.run(*choices, caching=True)
        assert [choice.num_cached_tokens for choice in choices] == [0, len(prompt) - 1, len(prompt) - 1]
        for seed, outcome in enumerate(outcomes):
            assert outcome.token_ids == harness.answer(prompt, temperature=1.0, seed=seed)

    def test_beams_are_the_same_in_company_and_with_little_memory(self, harness: Harness) -> None:
        prompt = harness.prompt(harness.block_size + 3)
        found = []
        size = harness.block_size
        company = (request("o", harness.prompt(size, seed=3), max_tokens=6 * size),)
        for others, limits in (((), {}), (company, {"num_blocks": 13})):
            fields = {"beams": BeamParams(width=3), "logprobs": 3, "max_tokens": size + 4}
            beams = [request(f"b{idx}", prompt, **fields) for idx in range(3)]
            for beam in beams:
                beam.parent_id = "b"
            outcomes = harness.run(*others, *beams, caching=True, **limits)
            found.append([outcome.token_ids for outcome in outcomes[len(others) :]])
        assert found[0] == found[1]
        assert len({tuple(token_ids) for token_ids in found[0]}) == 3

    @pytest.mark.parametrize("caching", [True, False])
    def test_preempted_is_not_preempted(self, harness: Harness, caching: bool) -> None:
        num_tokens = (MAX_BLOCKS_PER_ROW - 4) * harness.block_size
        prompts = [harness.prompt(harness.block_size * 2 - 1, seed=seed) for seed in (1, 2, 3)]
        requests = [request(f"r{idx}", prompt, max_tokens=num_tokens, arrival_ns=idx) for idx, prompt in enumerate(prompts)]
        outcomes = harness.run(*requests, caching=caching, num_blocks=1 + MAX_BLOCKS_PER_ROW)
        assert sum(r.num_preemptions for r in requests) > 0
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.token_ids == harness.answer(prompt, max_tokens=num_tokens)

    def test_padded_is_not_padded(self, harness: Harness) -> None:
        size = harness.block_size
        lengths = [(3, 9), (2 * size + 1, 2), (size, 5), (5, 1), (7, 3 * size)]
        prompts = [harness.prompt(num_tokens, seed=seed) for seed, (num_tokens, _) in enumerate(lengths)]
        requests = [
            request(f"r{idx}", prompt, max_tokens=num_tokens, arrival_ns=idx)
            for idx, (prompt, (_, num_tokens)) in enumerate(zip(prompts, lengths, strict=True))
        ]
        for outcome, prompt, (_, num_tokens) in zip(harness.run(*requests, policies=PADDED), prompts, lengths, strict=True):
            assert outcome.token_ids == harness.answer(prompt, max_tokens=num_tokens)

    def test_stop_tokens_wait_for_min_tokens(self, harness: Harness) -> None:
        prompt = harness.prompt(harness.block_size)
        first = harness.answer(prompt)[0]
        (stopped,) = harness.run(request("r", prompt, stop_token_ids=(first,)))
        assert stopped.token_ids == [first]
        (waited,) = harness.run(request("r", prompt, stop_token_ids=(first,), min_tokens=3))
        assert len(waited.token_ids) > 3
        assert first not in waited.token_ids[:3]

    def test_sampling_depends_on_the_seed_and_not_on_the_batch(self, harness: Harness) -> None:
        prompt = harness.prompt(harness.block_size + 1)
        seeds = [1, 2, 3, 2**64 - 1]
        alone = [harness.answer(prompt, temperature=1.0, seed=seed) for seed in seeds]
        together = harness.run(*(request(f"r{seed}", prompt, temperature=1.0, seed=seed) for seed in seeds))
        assert [outcome.token_ids for outcome in together] == alone
        assert len({tuple(tokens) for tokens in alone}) > 1


class TestPrompts:
    """Log-probabilities of prompts are a function of the prompt alone."""

    def test_there_is_one_for_each_token_but_the_first(self, harness: Harness) -> None:
        prompt = harness.prompt(harness.block_size + 3)
        entries = scores(harness, prompt)
        assert [entry.token_id for entry in entries] == list(prompt[1:])
        assert all(len(entry.top) == 3 for entry in entries)

    def test_a_prompt_of_one_token_has_none(self, harness: Harness) -> None:
        assert not scores(harness, harness.prompt(1))

    def test_they_are_those_of_sampling(self, harness: Harness) -> None:
        """To the last bit: what the model tells of a position does not depend on why it is asked."""
        prompt = harness.prompt(harness.block_size + 2)
        entries = scores(harness, prompt)
        if not harness.computes_logits:
            return  # a hash tells other numbers of prompts than of samples, so that no mistake shows as another
        for position in (0, 1, harness.block_size - 1, harness.block_size):
            entry = entries[position]
            (sampled,) = harness.run(request("r", prompt[: position + 1], max_tokens=1, logprobs=3))
            assert sampled.events[0].logprobs[0].top == entry.top
            (forced,) = harness.run(
                request("r", prompt[: position + 1], max_tokens=1, logprobs=0, allowed_token_ids=(entry.token_id,))
            )
            assert forced.events[0].logprobs[0] == replace(entry, top=())

    @pytest.mark.parametrize("limits", [{"max_step_tokens": 1}, {"max_step_tokens": 5}, {"max_scored": 1}, {"max_scored": 3}])
    def test_chunked_is_whole(self, harness: Harness, limits: dict[str, int]) -> None:
        prompt = harness.prompt(4 * harness.block_size + 2)
        assert scores(harness, prompt, **limits) == scores(harness, prompt)

    def test_company_changes_nothing(self, harness: Harness) -> None:
        prompts = [harness.prompt(1 + idx * harness.block_size * 2 // 3, seed=idx + 1) for idx in range(MAX_ROWS)]
        alone = [scores(harness, prompt) for prompt in prompts]
        requests = [request(f"r{idx}", prompt, prompt_logprobs=3) for idx, prompt in enumerate(prompts)]
        requests[1].sampling = replace(requests[1].sampling, prompt_logprobs=None)
        outcomes = harness.run(*requests, max_scored=5)
        for idx, (told, prompt, outcome) in enumerate(zip(requests, prompts, outcomes, strict=True)):
            assert told.prompt_logprobs == ([] if idx == 1 else alone[idx])
            assert outcome.token_ids == harness.answer(prompt)

    def test_what_is_cached_is_scored_too(self, harness: Harness) -> None:
        prompt = harness.prompt(3 * harness.block_size + 1)
        requests = request("first", prompt), request("second", prompt, arrival_ns=1, prompt_logprobs=3)
        scored_on(harness)
        harness.run(*requests, caching=True, max_rows=1)
        assert requests[1].num_cached_tokens == 0
        assert requests[1].prompt_logprobs == scores(harness, prompt)

    def test_preempted_is_not_preempted(self, harness: Harness) -> None:
        size = harness.block_size
        num_tokens = (MAX_BLOCKS_PER_ROW - 4) * size
        prompts = [harness.prompt(size * 2 - 1, seed=seed) for seed in (1, 2, 3)]
        requests = [
            request(f"r{idx}", prompt, max_tokens=num_tokens, arrival_ns=idx, prompt_logprobs=3)
            for idx, prompt in enumerate(prompts)
        ]
        alone = [scores(harness, prompt) for prompt in prompts]
        outcomes = harness.run(*requests, num_blocks=1 + MAX_BLOCKS_PER_ROW, max_scored=2)
        assert sum(r.num_preemptions for r in requests) > 0
        assert [told.prompt_logprobs for told in requests] == alone
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            assert outcome.token_ids == harness.answer(prompt, max_tokens=num_tokens)


def scored_on(harness: Harness) -> None:
    if not harness.make().capacity.max_scored:
        pytest.skip("this executor tells no log-probabilities of prompts")


def scores(harness: Harness, prompt: Sequence[int], **limits: int) -> list[TokenLogprobs]:
    """The entries that a fresh executor gives to a prompt alone, with three alternatives."""
    scored_on(harness)
    told = request("alone", prompt, prompt_logprobs=3)
    harness.run(told, **limits)
    assert not told.lacks_prompt_logprobs
    return told.prompt_logprobs


class TestSteps:
    """Plans made by hand."""

    def test_the_capacity_is_the_one_asked_for(self, harness: Harness) -> None:
        # Each executor knows best for how many positions it has logits, whether it checks guesses, its vocabulary, and which
        # sampling parameters it computes.
        made, asked = harness.make().capacity, harness.capacity
        own = {name: getattr(made, name) for name in ("max_scored", "checks_guesses", "vocab_size", "unsupported_parameters")}
        assert made == replace(asked, **own)

    def test_only_rows_that_sample_have_a_token(self, harness: Harness) -> None:
        feed = Feed(harness.make())
        prompt = harness.prompt(3)
        rows = [RowPlan("whole", 0, 3, (), True), RowPlan("part", 0, 2, (), False)]
        result = feed.step(rows, [admit("whole", prompt, [1]), admit("part", prompt, [2])])
        assert result.token_ids.keys() == {"whole"}
        assert len(result.token_ids["whole"]) == 1
        assert result.timing.end_ns >= result.timing.start_ns
        (token_id,) = feed.step([RowPlan("part", 2, 1, (), True)]).token_ids["part"]
        assert (token_id,) == result.token_ids["whole"]

    def test_logprobs_come_for_the_rows_that_asked(self, harness: Harness) -> None:
        feed = Feed(harness.make())
        prompt = harness.prompt(3)
        asking = replace(GREEDY, logprobs=2)
        rows = [RowPlan(name, 0, 3, (), True) for name in ("asks", "asks_not")]
        result = feed.step(rows, [admit("asks", prompt, [1], sampling=asking), admit("asks_not", prompt, [2])])
        assert result.logprobs.keys() == {"asks"}
        (logprobs,) = result.logprobs["asks"]
        assert (logprobs.token_id,) == result.token_ids["asks"]
        assert logprobs.rank == 1, "greedy takes the most likely"
        assert logprobs.top[0] == (logprobs.token_id, logprobs.logprob)
        assert len(logprobs.top) == 2
        assert 0 >= logprobs.top[0][1] >= logprobs.top[1][1]

    def test_a_row_without_a_usable_logit_fails_alone(self, harness: Harness) -> None:
        if not harness.computes_logits:
            pytest.skip("this executor has no logits to spoil")
        feed = Feed(harness.make())
        prompt = harness.prompt(3)
        rows = [RowPlan("good", 0, 3, (), True), RowPlan("bad", 2, 1, (), True)]
        never_written = admit("bad", prompt, [2], sampling=replace(GREEDY, logprobs=2), num_computed_tokens=2)
        result = feed.step(rows, [admit("good", prompt, [1]), never_written])
        assert result.failures.keys() == {"bad"}
        assert list(result.token_ids["good"]) == harness.answer(prompt)[:1]
        assert "bad" not in result.token_ids
        assert "bad" not in result.logprobs
        (token_id,) = feed.step([RowPlan("good", 3, 1, (), True)], releases=["bad"]).token_ids["good"]
        assert token_id == harness.answer(prompt)[1]

    def test_rows_can_be_in_any_order_and_be_left_out(self, harness: Harness) -> None:
        prompts = {"a": harness.prompt(2, seed=1), "b": harness.prompt(3, seed=2)}
        feed = Feed(harness.make())
        admits = [admit("a", prompts["a"], [5]), admit("b", prompts["b"], [3, 9])]
        result = feed.step([RowPlan("b", 0, 3, (), True), RowPlan("a", 0, 2, (), True)], admits)
        tokens = {name: list(result.token_ids[name]) for name in prompts}
        tokens["b"] += feed.decode("b", 3, 1)
        tokens["a"] += feed.decode("a", 2, 2)
        for name, prompt in prompts.items():
            assert tokens[name] == harness.answer(prompt)[: len(tokens[name])]

    def test_releases_come_before_admits(self, harness: Harness) -> None:
        """In one plan a request is forgotten, comes back under its name, and its block goes to another."""
        feed = Feed(harness.make())
        first, second = harness.prompt(3, seed=1), harness.prompt(3, seed=2)
        feed.step([RowPlan("a", 0, 3, (), True)], [admit("a", first, [1])])
        rows = [RowPlan("a", 0, 3, (), True), RowPlan("b", 0, 3, (), True)]
        result = feed.step(rows, [admit("a", second, [2]), admit("b", first, [1])], ["a"])
        assert list(result.token_ids["a"]) == harness.answer(second)[:1]
        assert list(result.token_ids["b"]) == harness.answer(first)[:1]

    def test_a_row_can_be_told_again_with_tokens_that_it_did_not_sample(self, harness: Harness) -> None:
        """They are computed together, beside the one that it did sample, and its blocks stay where they are."""
        feed, prompt = Feed(harness.make()), harness.prompt(3)
        (sampled,) = feed.step([RowPlan("a", 0, 3, (), True)], [admit("a", prompt, [1, 2, 3])]).token_ids["a"]
        longer = [*prompt, sampled, *harness.prompt(harness.block_size, seed=5)]
        row = RowPlan("a", 3, len(longer) - 3, (), True)
        (token_id,) = feed.step([row], [admit("a", longer, [1, 2, 3], num_computed_tokens=3)], ["a"]).token_ids["a"]
        assert [token_id, *feed.decode("a", len(longer), 2)] == harness.answer(longer)[:3]

    def test_all_rows_can_be_replaced_in_one_step(self, harness: Harness) -> None:
        feed = Feed(harness.make())
        names = [f"r{idx}" for idx in range(MAX_ROWS)]
        for seed, releases in ((1, []), (2, names)):
            prompt = harness.prompt(2, seed=seed)
            admits = [admit(name, prompt, [idx + 1]) for idx, name in enumerate(names)]
            result = feed.step([RowPlan(name, 0, 2, (), True) for name in names], admits, releases)
            assert [list(result.token_ids[name]) for name in names] == [harness.answer(prompt)[:1]] * MAX_ROWS

    def test_blocks_may_come_in_any_order(self, harness: Harness) -> None:
        size = harness.block_size
        prompt = harness.prompt(3 * size)
        feed = Feed(harness.make())
        result = feed.step([RowPlan("r", 0, 3 * size, (), True)], [admit("r", prompt, [7, 2, 5])])
        tokens = list(result.token_ids["r"])
        tokens += feed.step([RowPlan("r", 3 * size, 1, (1,), True)]).token_ids["r"]
        tokens += feed.decode("r", 3 * size + 1, min(2, size - 1))
        assert tokens == harness.answer(prompt)[: len(tokens)]

    def test_what_a_block_contained_before_does_not_matter(self, harness: Harness) -> None:
        size = harness.block_size
        feed = Feed(harness.make())
        blocks = range(1, 1 + MAX_BLOCKS_PER_ROW)
        long = harness.prompt(MAX_BLOCKS_PER_ROW * size - 1, seed=1)
        feed.step([RowPlan("long", 0, len(long), (), True)], [admit("long", long, blocks)])
        short = harness.prompt(size + 1, seed=2)
        rows = [RowPlan("short", 0, len(short), (), True)]
        result = feed.step(rows, [admit("short", short, list(blocks)[::-1][:2])], ["long"])
        assert list(result.token_ids["short"]) == harness.answer(short)[:1]

    def test_computed_blocks_can_be_handed_to_another_request(self, harness: Harness) -> None:
        size = harness.block_size
        prompt = harness.prompt(2 * size + 1)
        feed = Feed(harness.make())
        feed.step([RowPlan("a", 0, len(prompt), (), True)], [admit("a", prompt, [1, 2, 3])])
        shared = admit("b", prompt, [1, 2, 4], num_computed_tokens=2 * size)
        result = feed.step([RowPlan("b", 2 * size, 1, (), True)], [shared])
        assert list(result.token_ids["b"]) == harness.answer(prompt)[:1]

    def test_a_copied_block_is_as_good_as_the_original(self, harness: Harness) -> None:
        """Copy-on-write: two rows part ways in the middle of a block."""
        size = harness.block_size
        prompt = harness.prompt(2 * size - 1)
        feed = Feed(harness.make())
        feed.step([RowPlan("a", 0, len(prompt), (), True)], [admit("a", prompt, [1, 2])])
        feed.executor.copy_blocks([(2, 6)])
        other = (*prompt, 11)
        rows = [RowPlan("a", len(prompt), 1, (), True), RowPlan("b", len(prompt), 1, (), True)]
        result = feed.step(rows, [admit("b", other, [1, 6], num_computed_tokens=len(prompt))])
        assert list(result.token_ids["a"]) == harness.answer(prompt)[1:2]
        assert list(result.token_ids["b"]) == harness.answer(other)[:1]

    def test_copies_happen_in_order(self, harness: Harness) -> None:
        size = harness.block_size
        prompt = harness.prompt(size + 1)
        feed = Feed(harness.make())
        feed.step([RowPlan("a", 0, len(prompt), (), True)], [admit("a", prompt, [1, 2])])
        feed.executor.copy_blocks([(1, 8), (8, 9)])
        row = admit("b", prompt, [9, 3], num_computed_tokens=size)
        result = feed.step([RowPlan("b", size, 1, (), True)], [row])
        assert list(result.token_ids["b"]) == harness.answer(prompt)[:1]

    def test_what_was_read_can_be_written_elsewhere(self, harness: Harness) -> None:
        """Full blocks go to other blocks of another executor, in any order, while a row runs beside them."""
        size = harness.block_size
        prompt, other = harness.prompt(2 * size + 1), harness.prompt(3, seed=2)
        first, second = Feed(harness.make()), Feed(harness.make())
        first.step([RowPlan("a", 0, len(prompt), (), True)], [admit("a", prompt, [1, 2, 3])])
        memory = bytearray(2 * first.executor.block_bytes)
        contents = [memoryview(memory)[: len(memory) // 2], memoryview(memory)[len(memory) // 2 :]]
        read_blocks(first.executor, [2, 1], contents)
        second.step([RowPlan("b", 0, len(other), (), True)], [admit("b", other, [3])])
        second.executor.write_blocks([9, 7], contents)
        rows = [RowPlan("b", 3, 1, (), True), RowPlan("c", 2 * size, 1, (), True)]
        result = second.step(rows, [admit("c", prompt, [7, 9, 4], num_computed_tokens=2 * size)])
        assert list(result.token_ids["c"]) == harness.answer(prompt)[:1]
        assert list(result.token_ids["b"]) == harness.answer(other)[1:2]
        again = bytearray(len(memory) // 2)
        read_blocks(second.executor, [9], [memoryview(again)])
        assert bytes(again) == bytes(contents[0])

    def test_what_lies_in_memory_can_be_copied_by_any_thread(self, harness: Harness) -> None:
        """As above, without the executor, and while a step runs that has other blocks."""
        size = harness.block_size
        prompt, other = harness.prompt(2 * size + 1), harness.prompt(3, seed=2)
        first, second = Feed(harness.make()), Feed(harness.make())
        if (source := getattr(first.executor, "block_memory", None)) is None:
            pytest.skip("this executor's blocks do not lie in this process's memory")
        first.step([RowPlan("a", 0, len(prompt), (), True)], [admit("a", prompt, [1, 2, 3])])
        target = second.executor.block_memory
        second.step([RowPlan("b", 0, len(other), (), True)], [admit("b", other, [3])])

        def copy() -> None:
            for there, here in ((2, 9), (1, 7)):
                target.target(here)[:] = source.content(there)
                target.fill(here)

        with ThreadPoolExecutor(1) as pool:
            copied = pool.submit(copy)
            second.step([RowPlan("b", 3, 1, (), True)])
            copied.result()
        result = second.step(
            [RowPlan("c", 2 * size, 1, (), True)], [admit("c", prompt, [7, 9, 4], num_computed_tokens=2 * size)]
        )
        assert list(result.token_ids["c"]) == harness.answer(prompt)[:1]
        again = bytearray(target.block_bytes)
        read_blocks(second.executor, [9], [memoryview(again)])
        assert again == source.content(2)

    def test_contents_move_beside_a_step_in_flight(self, harness: Harness) -> None:
        """Full blocks that no row of it has are read, written and copied, and the next step goes on from there."""
        size = harness.block_size
        prompt, other = harness.prompt(2 * size + 1), harness.prompt(3, seed=2)
        feed = Feed(harness.make())
        executor = feed.executor
        feed.step([RowPlan("a", 0, len(prompt), (), True)], [admit("a", prompt, [1, 2, 3])])
        plan = StepPlan(1, 0, (admit("b", other, [4]),), (RowPlan("b", 0, len(other), (), True),), ("a",))
        ticket = executor.submit(plan)
        if executor.depth == 1:
            executor.collect(ticket)
        contents = [memoryview(bytearray(executor.block_bytes)) for _ in range(3)]
        read_blocks(executor, [2, 1], contents[:2])
        executor.write_blocks([9, 7], contents[:2])
        executor.copy_blocks([(9, 8), (7, 9)])
        read_blocks(executor, [8], contents[2:])
        assert contents[2] == contents[0]
        expected = bytes(contents[2])
        executor.write_blocks([2], contents[1:2])
        contents[1][:] = contents[0][:] = bytes(executor.block_bytes)  # they are ours again
        rows = (RowPlan("b", 3, 1, (), True), RowPlan("c", 2 * size, 1, (), True))
        later = executor.submit(StepPlan(2, 0, (admit("c", prompt, [9, 8, 5], num_computed_tokens=2 * size),), rows, ()))
        if executor.depth > 1:
            executor.collect(ticket)
        result = executor.collect(later)
        assert list(result.token_ids["c"]) == harness.answer(prompt)[:1]
        assert list(result.token_ids["b"]) == harness.answer(other)[1:2]
        read_blocks(executor, [2], contents[:1])
        read_blocks(executor, [9], contents[1:2])
        assert contents[0] == contents[1] != expected
        ready = executor.read_blocks([2], contents[:1])
        executor.write_blocks([2], [memoryview(expected)])
        if ready is not None:
            ready()
            ready()
        assert contents[0] == contents[1], "what it contained when it was asked for"

    @pytest.mark.parametrize("block_id", [0, -1, 10**6])
    def test_only_blocks_that_exist_are_read_and_written(self, harness: Harness, block_id: int) -> None:
        executor = harness.make()
        content = memoryview(bytearray(executor.block_bytes))
        with pytest.raises(BROKEN):
            executor.read_blocks([block_id], [content])
        with pytest.raises(BROKEN):
            executor.write_blocks([block_id], [content])

    def test_padding_changes_no_answer(self, harness: Harness) -> None:
        """Rows of padding fill the null block, several in a step, of any length, while a request runs; one of them samples."""
        size = harness.block_size
        prompt = harness.prompt(size + 1)
        feed = Feed(harness.make())
        name_of_long, name_of_late = PaddingId("long"), PaddingId("late")
        long = admit(name_of_long, (0,) * (2 * size + 2), [0] * 3)
        late = admit(name_of_late, (0,) * (size + 1), [0] * MAX_BLOCKS_PER_ROW, num_computed_tokens=size)
        rows = [
            RowPlan(name_of_long, 0, size + 2, (), False),
            RowPlan("a", 0, size + 1, (), True),
            RowPlan(name_of_late, size, 1, (), True),
        ]
        result = feed.step(rows, [long, admit("a", prompt, [1, 2]), late])
        assert result.token_ids.keys() == {"a", name_of_late}
        tokens = list(result.token_ids["a"])
        rows = [
            RowPlan("a", size + 1, 1, (), True),
            RowPlan(name_of_long, size + 2, size - 1, (), False),
            RowPlan(name_of_late, size + 1, 1, (), True),
        ]
        tokens += feed.step(rows).token_ids["a"]
        rows = [RowPlan(name_of_late, size + 2, 1, (), True), RowPlan("a", size + 2, 1, (), True)]
        tokens += feed.step(rows, releases=[name_of_long]).token_ids["a"]
        assert tokens == harness.answer(prompt)[:3]

    def test_close_can_be_called_again(self, harness: Harness) -> None:
        executor = harness.make()
        executor.close()
        executor.close()


FOLLOWING = replace(GREEDY, follows_grammar=True)
WITH_PENALTIES = replace(GREEDY, temperature=0.8, seed=6, top_k=5, repetition_penalty=1.7, frequency_penalty=1.5, logprobs=2)


class TestGuesses:
    """Guesses change how many tokens a step gives, and nothing else."""

    @pytest.fixture(autouse=True)
    def _can_guess(self, harness: Harness) -> None:
        if not harness.make().capacity.checks_guesses:
            pytest.skip("this executor does not check guesses")

    # Checking a guess does not depend on how tokens are sampled, so only greedy rows have every number of right guesses.
    @pytest.mark.parametrize(
        ("sampling", "num_right"),
        [
            *(pytest.param(GREEDY, num_right, id=f"greedy-{num_right}") for num_right in range(4)),
            pytest.param(replace(GREEDY, logprobs=3), 2, id="greedy with logprobs"),
            pytest.param(replace(GREEDY, temperature=1.0, seed=5), 3, id="sampled"),
            pytest.param(WITH_PENALTIES, 0, id="with penalties-0"),
            pytest.param(WITH_PENALTIES, 2, id="with penalties-2"),
            pytest.param(replace(GREEDY, min_tokens=6, stop_token_ids=(11, 12, 13)), 3, id="with a least length"),
        ],
    )
    def test_tokens_are_those_of_single_steps(self, harness: Harness, sampling: SamplingParams, num_right: int) -> None:
        prompt, company = harness.prompt(harness.block_size - 2), harness.prompt(3, seed=2)
        num_prompt, feed = len(prompt), Feed(harness.make())
        rows = [RowPlan("a", 0, num_prompt, (), 1)]
        singles = [feed.step(rows, [admit("a", prompt, [1, 2], sampling=sampling)])]
        singles += [feed.step([RowPlan("a", num_prompt + idx, 1, (), 1)]) for idx in range(6)]
        tokens = [token_id for result in singles for token_id in result.token_ids["a"]]
        entries = [entry for result in singles for entry in result.logprobs.get("a", ())]

        feed = Feed(harness.make())
        admits = [admit("a", prompt, [1, 2], sampling=sampling), admit("b", company, [3])]
        found = [feed.step([*rows, RowPlan("b", 0, 3, (), 1)], admits)]
        wrong = next(token_id for token_id in range(20, 99) if token_id not in tokens)
        guesses = (*tokens[1 : 1 + num_right], *[wrong] * (3 - num_right))
        planned = [RowPlan("a", num_prompt, 4, (), 4), RowPlan("b", 3, 1, (), 1)]
        found.append(feed.step(planned, guesses={"a": guesses}))
        assert len(found[-1].token_ids["a"]) == num_right + 1
        context_len = num_prompt + 1 + num_right
        while context_len < num_prompt + 6:
            found.append(feed.step([RowPlan("a", context_len, 1, (), 1)]))
            context_len += 1
        assert [token_id for result in found for token_id in result.token_ids["a"]] == tokens
        assert [entry for result in found for entry in result.logprobs.get("a", ())] == entries
        others = [token_id for result in found for token_id in result.token_ids.get("b", ())]
        assert others == harness.answer(company)[:2]

    def test_each_place_has_a_mask_of_its_own(self, harness: Harness) -> None:
        feed = Feed(harness.make())
        masks = [mask_of([token_id], harness.vocab_size) for token_id in (17, 18, 19, 20)]
        feed.step(
            [RowPlan("a", 0, 3, (), 1)], [admit("a", harness.prompt(3), [1, 2], sampling=FOLLOWING)], masks={"a": masks[0]}
        )
        planned, guesses = [RowPlan("a", 3, 4, (), 4)], {"a": (18, 19, 40)}
        result = feed.step(planned, masks={"a": b"".join([*masks[1:], masks[0]])}, guesses=guesses)
        assert result.token_ids["a"] == (18, 19, 20), "the last guess is not allowed"
        with pytest.raises(ValueError, match="bytes"):
            feed.step([RowPlan("a", 6, 2, (), 2)], masks={"a": masks[0]}, guesses={"a": (17,)})

    @pytest.mark.parametrize(
        ("row", "guesses"),
        [
            (RowPlan("a", 3, 2, (), 2), {"a": (10**6,)}),
            (RowPlan("a", 3, 2, (), 2), {"a": (-1,)}),
            (RowPlan("a", 3, 2, (), 2), {"b": (20,)}),
            (RowPlan("a", 3, 2, (), 2), {}),
            (RowPlan("a", 3, 1, (), 1), {"a": (20,)}),
            (RowPlan("a", 3, 2, (), 0), {"a": (20,)}),
        ],
    )
    def test_guesses_that_break_the_contract_are_refused(
        self, harness: Harness, row: RowPlan, guesses: dict[str, tuple[int, ...]]
    ) -> None:
        feed = Feed(harness.make())
        feed.step([RowPlan("a", 0, 3, (), 1)], [admit("a", harness.prompt(3), [1])])
        with pytest.raises(BROKEN):
            feed.step([row], guesses=guesses)

    def test_more_guesses_than_there_are_logits_for_are_refused(self, harness: Harness) -> None:
        feed = Feed(harness.make())
        num = feed.executor.capacity.max_scored + 1
        if 4 + num > 5 * harness.block_size:
            pytest.skip("there are logits for more guesses than a row has room for")
        feed.step([RowPlan("a", 0, 3, (), 1)], [admit("a", harness.prompt(3), range(1, 6))])
        with pytest.raises(BROKEN):
            feed.step([RowPlan("a", 3, 1 + num, (), 1 + num)], guesses={"a": (20,) * num})


class TestGrammars:
    """Rows whose tokens are restricted step by step."""

    def test_a_mask_leaves_one_token(self, harness: Harness) -> None:
        feed = Feed(harness.make())
        rows = [RowPlan("a", 0, 3, (), True), RowPlan("b", 0, 2, (), True)]
        admits = [admit("a", harness.prompt(3), [1], sampling=FOLLOWING), admit("b", harness.prompt(2, seed=2), [2])]
        result = feed.step(rows, admits, masks={"a": mask_of([17], harness.vocab_size)})
        assert result.token_ids["a"] == (17,)
        assert list(result.token_ids["b"]) == harness.answer(harness.prompt(2, seed=2))[:1]

    def test_a_mask_that_allows_all_changes_nothing(self, harness: Harness) -> None:
        if not harness.computes_logits:
            pytest.skip("the hash executor draws among what is allowed")
        prompt, everything = harness.prompt(5), range(harness.vocab_size)
        for sampling in (FOLLOWING, replace(FOLLOWING, temperature=1.0, seed=3, logprobs=2)):
            feed = Feed(harness.make())
            wanted = harness.answer(prompt, temperature=sampling.temperature, seed=sampling.seed)
            admits = [admit("a", prompt, range(1, 4), sampling=sampling)]
            tokens = []
            for step in range(3):
                rows = [RowPlan("a", 0, 5, (), True) if step == 0 else RowPlan("a", 4 + step, 1, (), True)]
                result = feed.step(rows, admits if step == 0 else (), masks={"a": mask_of(everything, harness.vocab_size)})
                tokens += result.token_ids["a"]
            assert tokens == wanted[:3]

    def test_the_best_of_what_is_allowed_is_chosen(self, harness: Harness) -> None:
        """And its log-probability is that of all tokens, as without a mask."""
        if not harness.computes_logits:
            pytest.skip("the hash executor has no logits")
        prompt = harness.prompt(4)
        feed = Feed(harness.make())
        free = feed.step([RowPlan("f", 0, 4, (), True)], [admit("f", prompt, [1], sampling=replace(GREEDY, logprobs=6))])
        (likely,) = free.logprobs["f"]
        allowed = [token_id for token_id, _ in likely.top[2:]]
        told = replace(FOLLOWING, logprobs=6)
        rows = [RowPlan("a", 0, 4, (), True), RowPlan("b", 0, 4, (), True)]
        admits = [admit("a", prompt, [2], sampling=told), admit("b", prompt, [3], sampling=FOLLOWING)]
        masks = dict.fromkeys("ab", mask_of(allowed, harness.vocab_size))
        result = feed.step(rows, admits, ["f"], masks=masks)
        assert result.token_ids["a"] == result.token_ids["b"] == (likely.top[2][0],)
        (found,) = result.logprobs["a"]
        assert (found.logprob, found.rank, found.top) == (likely.top[2][1], 3, likely.top)

    def test_stop_tokens_come_early_where_nothing_else_is_allowed(self, harness: Harness) -> None:
        sampling = replace(FOLLOWING, stop_token_ids=(11, 12), min_tokens=5)
        prompt = harness.prompt(3)
        for allowed, wanted in (([12], 12), ([11, 12, 50], 50)):
            feed = Feed(harness.make())
            masks = {"a": mask_of(allowed, harness.vocab_size)}
            result = feed.step([RowPlan("a", 0, 3, (), True)], [admit("a", prompt, [1], sampling=sampling)], masks=masks)
            assert result.token_ids["a"] == (wanted,)

    def test_who_is_not_named_is_not_restricted_nor_is_the_next_step(self, harness: Harness) -> None:
        if not harness.computes_logits:
            pytest.skip("the hash executor draws among what is allowed")
        prompt = harness.prompt(3)
        feed = Feed(harness.make())
        first = feed.step([RowPlan("a", 0, 3, (), True)], [admit("a", prompt, [1, 2], sampling=FOLLOWING)], masks={})
        assert list(first.token_ids["a"]) == harness.answer(prompt)[:1]
        second = feed.step([RowPlan("a", 3, 1, (), True)], masks={"a": mask_of([19], harness.vocab_size)})
        assert second.token_ids["a"] == (19,)
        third = feed.step([RowPlan("a", 4, 1, (), True)], masks={})
        assert list(third.token_ids["a"]) == harness.answer((*prompt, *first.token_ids["a"], 19))[:1]

    def test_a_prompt_that_is_not_complete_waits_for_no_mask(self, harness: Harness) -> None:
        prompt = harness.prompt(5)
        feed = Feed(harness.make())
        result = feed.step([RowPlan("a", 0, 3, (), False)], [admit("a", prompt, range(1, 4), sampling=FOLLOWING)])
        assert not result.token_ids
        result = feed.step([RowPlan("a", 3, 2, (), True)], masks={"a": mask_of([21], harness.vocab_size)})
        assert result.token_ids["a"] == (21,)

    def test_a_name_that_comes_again_without_a_grammar_waits_for_no_mask(self, harness: Harness) -> None:
        prompt = harness.prompt(3)
        feed = Feed(harness.make())
        masks = {"a": mask_of([17], harness.vocab_size)}
        feed.step([RowPlan("a", 0, 3, (), True)], [admit("a", prompt, [1], sampling=FOLLOWING)], masks=masks)
        result = feed.step([RowPlan("a", 0, 3, (), True)], [admit("a", prompt, [2])], ["a"])
        assert list(result.token_ids["a"]) == harness.answer(prompt)[:1]

    def test_masks_come_while_the_step_is_in_flight(self, harness: Harness) -> None:
        """Where two may be: those of the second when the first was collected, and its row's token is known."""
        executor = harness.make()
        if executor.depth == 1:
            pytest.skip("no step is submitted before the one before it was collected")
        prompt, vocab = harness.prompt(3), harness.vocab_size
        admits = (admit("a", prompt, [1, 2], sampling=FOLLOWING), admit("b", prompt, [3, 4]))
        rows = (RowPlan("a", 0, 3, (), True), RowPlan("b", 0, 3, (), True))
        ticket = executor.submit(StepPlan(0, 0, admits, rows, ()))
        executor.restrict(ticket, {"a": mask_of([17], vocab)})
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        for step in range(1, 4):
            rows = (RowPlan("a", 2 + step, 1, (), True), RowPlan("b", 2 + step, 1, (), True))
            following = executor.submit(StepPlan(step, 0, (), rows, ()))
            result = executor.collect(ticket)
            for name, found in tokens.items():
                found += result.token_ids[name]
            executor.restrict(following, {"a": mask_of([tokens["a"][-1] + 1], vocab)})
            ticket = following
        result = executor.collect(ticket)
        assert [*tokens["a"], *result.token_ids["a"]] == [17, 18, 19, 20]
        assert [*tokens["b"], *result.token_ids["b"]] == harness.answer(prompt)[:4]

    def test_answers_follow_their_grammars_in_company(self, harness: Harness) -> None:
        def requests() -> list[Request]:
            grammars = {seed: HashMatcher(harness.vocab_size, seed=seed) for seed in (1, 2)}
            prompts = {seed: harness.prompt(seed * harness.block_size + 1, seed=seed) for seed in (0, 1, 2)}
            return [request(f"r{seed}", prompt, matcher=grammars.get(seed)) for seed, prompt in prompts.items()]

        together = [outcome.token_ids for outcome in harness.run(*requests(), max_step_tokens=7)]
        assert together == [harness.run(alone)[0].token_ids for alone in requests()]
        assert all(len(token_ids) == GREEDY.max_tokens for token_ids in together)

    def test_forced_tokens_at_once_are_those_one_by_one(self, harness: Harness) -> None:
        """Also beside penalties, which count them, and a seed, whose draws depend on their number."""

        class OneByOne(HashMatcher):
            def forced(self) -> Sequence[int]:
                return ()

        def requests(kind: type[HashMatcher]) -> list[Request]:
            size, vocab_size = harness.block_size, harness.vocab_size
            return [
                request(
                    f"r{seed}",
                    harness.prompt(seed * size - 1, seed=seed),
                    matcher=kind(vocab_size, seed=seed, num_forced=5),
                    temperature=seed % 2,
                    seed=seed,
                    max_tokens=2 * size,
                    frequency_penalty=0.5,
                    repetition_penalty=1.2,
                )
                for seed in (1, 2, 3)
            ]

        alone = [harness.run(one)[0].token_ids for one in requests(OneByOne)]
        together = harness.run(*requests(HashMatcher), max_step_tokens=7)
        assert [outcome.token_ids for outcome in together] == alone
        num_events = [len(outcome.events) for outcome in together]
        assert harness.make().depth > 1 or max(num_events) < 2 * harness.block_size, "some came at once"

    @pytest.mark.parametrize(
        "masks",
        [{"b": [1]}, {"x": [1]}, {"c": [1]}, {"a": None}],
        ids=["follows no grammar", "unknown", "does not sample", "too long"],
    )
    def test_masks_that_break_the_contract_are_refused(self, harness: Harness, masks: dict[str, list[int] | None]) -> None:
        executor = harness.make()
        admits = (
            admit("a", harness.prompt(3), [1], sampling=FOLLOWING),
            admit("b", harness.prompt(3), [2]),
            admit("c", harness.prompt(3), [3], sampling=FOLLOWING),
        )
        rows = (RowPlan("a", 0, 3, (), True), RowPlan("b", 0, 3, (), True), RowPlan("c", 0, 2, (), False))
        ticket = executor.submit(StepPlan(0, 0, admits, rows, ()))
        with pytest.raises(BROKEN):
            executor.restrict(
                ticket,
                {
                    name: mask_of([1], harness.vocab_size) if allowed else bytes(-(-harness.vocab_size // 32) * 4 + 4)
                    for name, allowed in masks.items()
                },
            )

    def test_masks_come_once_and_where_they_are_waited_for(self, harness: Harness) -> None:
        executor = harness.make()
        ticket = executor.submit(StepPlan(0, 0, (admit("b", harness.prompt(3), [2]),), (RowPlan("b", 0, 3, (), True),), ()))
        with pytest.raises(BROKEN):
            executor.restrict(ticket, {})
        executor.collect(ticket)
        admits = (admit("a", harness.prompt(3), [1], sampling=FOLLOWING),)
        ticket = executor.submit(StepPlan(1, 0, admits, (RowPlan("a", 0, 3, (), True),), ("b",)))
        with pytest.raises(BROKEN):
            executor.submit(StepPlan(2, 0, (), (RowPlan("a", 3, 1, (), True),), ()))
        executor.restrict(ticket, {"a": mask_of([5], harness.vocab_size)})
        with pytest.raises(BROKEN):
            executor.restrict(ticket, {"a": mask_of([5], harness.vocab_size)})
        assert executor.collect(ticket).token_ids["a"] == (5,)

    def test_no_step_is_collected_without_its_masks(self, harness: Harness) -> None:
        executor = harness.make()
        admits = (admit("a", harness.prompt(3), [1], sampling=FOLLOWING),)
        ticket = executor.submit(StepPlan(0, 0, admits, (RowPlan("a", 0, 3, (), True),), ()))
        with pytest.raises(BROKEN):
            executor.collect(ticket)


BREACHES: dict[str, Callable[[Feed, Harness], object]] = {
    "a row of an unknown request": lambda feed, h: feed.step([RowPlan("x", 0, 1, (), True)]),
    "release of an unknown request": lambda feed, h: feed.step([RowPlan("a", 3, 1, (), True)], releases=["x"]),
    "a row of a released request": lambda feed, h: feed.step([RowPlan("a", 3, 1, (), True)], releases=["a"]),
    "a request admitted twice": lambda feed, h: feed.step([RowPlan("a", 3, 1, (), True)], [admit("a", h.prompt(3), [2])]),
    "a token outside the vocabulary": lambda feed, h: feed.step(
        [RowPlan("b", 0, 1, (), True)], [admit("b", [h.vocab_size], [2])]
    ),
    "a negative token": lambda feed, h: feed.step([RowPlan("b", 0, 1, (), True)], [admit("b", [-1], [2])]),
    "a context that skips tokens": lambda feed, h: feed.step([RowPlan("b", 1, 2, (), True)], [admit("b", h.prompt(3), [2])]),
    "more tokens than are known": lambda feed, h: feed.step([RowPlan("a", 3, 2, (), True)]),
    "a row without tokens": lambda feed, h: feed.step([RowPlan("a", 3, 0, (), True)]),
    "two rows of one request": lambda feed, h: feed.step([RowPlan("a", 3, 1, (), True), RowPlan("a", 3, 1, (), True)]),
    "too few blocks": lambda feed, h: feed.step(
        [RowPlan("b", 0, h.block_size + 1, (), True)], [admit("b", h.prompt(h.block_size + 1), [2])]
    ),
    "the null block in a table": lambda feed, h: feed.step([RowPlan("b", 0, 3, (), True)], [admit("b", h.prompt(3), [0])]),
    "a block of its own in the table of padding": lambda feed, h: feed.step(
        [RowPlan(PADDING, 0, 3, (), False)], [admit(PADDING, h.prompt(4), [2])]
    ),
    "a block of its own appended to padding": lambda feed, h: feed.step(
        [RowPlan(PADDING, 0, h.block_size + 1, (2,), False)], [admit(PADDING, h.prompt(h.block_size + 2), [0])]
    ),
    "the null block after others": lambda feed, h: feed.step(
        [RowPlan("b", 0, h.block_size + 1, (0,), True)], [admit("b", h.prompt(h.block_size + 1), [2])]
    ),
    "a block that does not exist": lambda feed, h: feed.step(
        [RowPlan("b", 0, 3, (), True)], [admit("b", h.prompt(3), [h.capacity.num_blocks])]
    ),
    "more rows than there are": lambda feed, h: feed.step(
        [RowPlan(f"b{idx}", 0, 1, (), True) for idx in range(MAX_ROWS)],
        [admit(f"b{idx}", h.prompt(1), [idx + 2]) for idx in range(MAX_ROWS)],
    ),
    "more tokens than a step may have": lambda feed, h: feed.step(
        [RowPlan(name, 0, h.capacity.max_step_tokens - h.block_size, (), False) for name in ("b", "c")],
        [
            admit("b", h.prompt(h.capacity.max_model_len - 1), range(2, 2 + MAX_BLOCKS_PER_ROW)),
            admit("c", h.prompt(h.capacity.max_model_len - 1), range(12, 12 + MAX_BLOCKS_PER_ROW)),
        ],
    ),
}


@pytest.mark.parametrize("breach", BREACHES.values(), ids=BREACHES.keys())
def test_a_plan_that_breaks_the_contract_is_refused(harness: Harness, breach: Callable[[Feed, Harness], object]) -> None:
    feed = Feed(harness.make())
    # Request "a" is known, with a prompt of three tokens, and has sampled one.
    feed.step([RowPlan("a", 0, 3, (), True)], [admit("a", harness.prompt(3), [1])])
    with pytest.raises(BROKEN):
        breach(feed, harness)
