"""Staged servers that are ill, by the rule that should name the cause, and healthy ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.lab.cost_model import CostModel
from penstock.types.request import WaitTimes
from support.doctor.stage import SECOND_NS, Stage, Visitor, Workshop, poisson, slowed


def window_too_long() -> Stage:
    return Stage(poisson(20, 2, prompt=60, answer=[5, 20]), {"preset": "dynamic", "batch_window": 1.0})


def too_few_rows() -> Stage:
    return Stage(poisson(12, 3, prompt=50, answer=[60, 120]), {"max_num_seqs": 1}, until_s=12)


def small_kv_cache() -> Stage:
    return Stage(poisson(14, 4, prompt=[100, 300], answer=[100, 200]), blocks=60, until_s=14)


def thrash() -> Stage:
    visitors = poisson(11, 3, prompt=[60, 100], answer=[150, 300])
    return Stage(visitors, {"reserve": "chunk", "max_num_seqs": 16}, blocks=60, until_s=15)


def greedy_key() -> Stage:
    flood = [Visitor(at_s=0.1 * nth, prompt=200, answer=150, tenant="scraper") for nth in range(100)]
    others = poisson(15, 1, prompt=60, answer=[20, 60], tenant="people")
    return Stage([*flood, *others], {"max_num_seqs": 8}, until_s=15)


def prompts_beside_streams() -> Stage:
    streams = [Visitor(at_s=0.1 * nth, prompt=30, answer=400) for nth in range(8)]
    prompts = [Visitor(at_s=1 + 1.5 * nth, prompt=1800, answer=5) for nth in range(8)]
    return Stage([*streams, *prompts], {"budget": "decode-first", "max_num_batched_tokens": 4096})


def prompts_before_streams() -> Stage:
    """Prompts take many short steps in a row, in which the streams have no row."""
    streams = [Visitor(at_s=0.1 * nth, prompt=30, answer=400) for nth in range(8)]
    prompts = [Visitor(at_s=1 + 2 * nth, prompt=1800, answer=5) for nth in range(5)]
    return Stage([*streams, *prompts], {"budget": "prefill-first", "max_num_batched_tokens": 64})


def slow_readers() -> Stage:
    return Stage(poisson(40, 1, prompt=100, answer=[50, 100]), client_wait_s=25.0)


def noisy_neighbour() -> Stage:
    """One of two threads waits for its CPU half of the time, and the other one for it: steps take half as long again."""
    visitors, cost = poisson(40, 1, prompt=100, answer=[50, 100]), slowed(CostModel(), 1.5)
    busy_s = Stage(visitors, cost=cost).server.busy_ns / SECOND_NS
    return Stage(visitors, cost=cost, cpu_s={"running": 1.5 * busy_s, "waiting": 0.5 * busy_s, "others": 0.5 * busy_s})


def early_retries() -> Stage:
    visitors = [Visitor(at_s=0.1 * nth, prompt=100, answer=200, returns_after_s=0.05) for nth in range(60)]
    return Stage(visitors, {"max_queue": 4, "max_num_seqs": 8}, until_s=9)


def chunk_too_small() -> Stage:
    settings = {"budget": "decode-first", "max_num_batched_tokens": 24}
    return Stage(poisson(60, 0.5, prompt=[600, 1200], answer=[20, 40]), settings)


def slow_grammars() -> Stage:
    waits = WaitTimes(grammar=SECOND_NS // 2)
    return Stage(poisson(40, 1, prompt=100, answer=[50, 100], waits=waits))


def cold_models() -> Stage:
    return Stage([Visitor(at_s=20 * nth, waits=WaitTimes(model=8 * SECOND_NS)) for nth in range(6)])


def date_at_the_start() -> Stage:
    """Each prompt has a system prompt of 600 tokens with the time of the day after its first words."""
    head, body = tuple(range(10)), tuple(range(1000, 1590))
    visitors = [
        Visitor(at_s=2 * nth, prompt=(*head, 5000 + nth, 6000 + nth % 60, *body, 7000 + nth), answer=20) for nth in range(20)
    ]
    return Stage(visitors)


def endless_answers() -> Stage:
    visitors = poisson(30, 0.5, prompt=50, answer=[20, 40])
    endless = [Visitor(at_s=5 + 8 * nth, prompt=50, answer=5000, max_tokens=2048 - 50) for nth in range(3)]
    return Stage([*visitors, *endless])


SEEN: Mapping[str, Callable[[], Stage]] = {
    "batch window": window_too_long,
    "few rows": too_few_rows,
    "small KV cache": small_kv_cache,
    "thrash": thrash,
    "greedy key": greedy_key,
    "long steps": prompts_beside_streams,
    "slow readers": slow_readers,
    "noisy neighbour": noisy_neighbour,
    "refusals": early_retries,
    "short steps": chunk_too_small,
    "slow grammars": slow_grammars,
    "cold models": cold_models,
    "prompts differ early": date_at_the_start,
    "endless answers": endless_answers,
}
"""The rules were made with these in view."""


# Staged after the rules were written.


def padded_batches() -> Stage:
    visitors = [
        Visitor(at_s=0.02 * nth, prompt=20 + 400 * (nth % 8 == 0), answer=10 + 150 * (nth % 8 == 1)) for nth in range(80)
    ]
    return Stage(visitors, {"preset": "static", "max_batch_size": 8})


def reserved_memory() -> Stage:
    """Clients allow 1,500 tokens, answers have 60, and an admission reserves all of them."""
    visitors = poisson(20, 4, prompt=[50, 100], answer=[40, 80], max_tokens=1500)
    return Stage(visitors, {"reserve": "no-evict"}, blocks=200, until_s=20)


def starved_requests() -> Stage:
    """Short prompts keep coming, and longer ones wait for them."""
    short = poisson(14, 9, prompt=[30, 60], answer=[20, 40])
    long = poisson(12, 0.5, seed=2, prompt=[300, 400], answer=[100, 200])
    return Stage([*short, *long], {"policy": "sjf", "max_num_seqs": 2}, until_s=14)


def background_beside_people() -> Stage:
    lines = [Visitor(at_s=0, prompt=300, answer=600, background=True) for _ in range(40)]
    return Stage([*poisson(20, 1, prompt=100, answer=[60, 100]), *lines], {"background_share": 0.6}, until_s=20)


def cold_adapters() -> Workshop:
    """Eight adapters in turn, of which memory keeps two."""
    visitors = [Visitor(at_s=0.04 * nth, prompt=20, answer=20) for nth in range(40)]
    return Workshop(visitors, read_s=0.05, adapters_of=lambda number: 1 + number % 8)


def slow_tier() -> Workshop:
    """Twelve conversations, of which the KV cache holds two; each comes back with its history."""
    visitors = [
        Visitor(
            at_s=0.3 * (12 * turn + session),
            prompt=tuple((31 * session + place) % 900 + 10 for place in range(80 + 12 * turn)),
            answer=4,
        )
        for turn in range(3)
        for session in range(12)
    ]
    return Workshop(visitors, read_s=0.01, tier_slots=600, blocks=60)


UNSEEN: Mapping[str, Callable[[], Stage | Workshop]] = {
    "padding": padded_batches,
    "reserved memory": reserved_memory,
    "order": starved_requests,
    "background": background_beside_people,
    "cold adapters": cold_adapters,
    "slow tier": slow_tier,
}
"""The rules were not made for these."""


# The healthy ones.


def light_load() -> Stage:
    return Stage(poisson(40, 1, prompt=[50, 200], answer=[20, 80]))


def half_load() -> Stage:
    return Stage(poisson(20, 4, prompt=[50, 200], answer=[20, 80]))


def bursts_that_drain() -> Stage:
    return Stage([Visitor(at_s=15.0 * burst, prompt=100, answer=60) for burst in range(4) for _ in range(20)], until_s=60)


def one_client() -> Stage:
    return Stage([Visitor(at_s=3 * nth, prompt=300, answer=150) for nth in range(12)])


def only_batches() -> Stage:
    return Stage([Visitor(at_s=0, prompt=200, answer=200, background=True) for _ in range(60)], until_s=10)


def chats_with_a_shared_head() -> Stage:
    """Prompts that begin alike, as a chat template makes them, and then have words of their own."""
    head = tuple(range(20))
    visitors = [
        Visitor(at_s=1.5 * nth, prompt=(*head, *range(10_000 * nth + 1000, 10_000 * nth + 1150)), answer=60)
        for nth in range(30)
    ]
    return Stage(visitors)


def long_prompts_alone() -> Stage:
    return Stage(poisson(60, 0.3, prompt=[800, 1800], answer=[50, 100]))


def streams_beside_prompts() -> Stage:
    """The default target keeps steps short."""
    streams = [Visitor(at_s=0.1 * nth, prompt=30, answer=300) for nth in range(6)]
    return Stage([*streams, *poisson(20, 0.5, prompt=[200, 400], answer=[20, 40])])


def answers_of_one_token() -> Stage:
    return Stage(poisson(40, 5, prompt=[20, 120], answer=1))


def many_streams() -> Stage:
    return Stage([Visitor(at_s=0.2 * nth, prompt=20, answer=300) for nth in range(60)])


HEALTHY = (
    light_load,
    half_load,
    bursts_that_drain,
    one_client,
    only_batches,
    chats_with_a_shared_head,
    long_prompts_alone,
    streams_beside_prompts,
    answers_of_one_token,
    many_streams,
)
