"""The settings of the scheduling: a preset and what replaces parts of it. Read by `build`'s parts; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.config.setting import Component, Kind, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Component):
    """What runs in the next step."""

    title: ClassVar[str] = "Scheduling"

    preset: str = setting(
        "penstock",
        "Named bundle of policies.",
        kind=Kind.CHOICE,
        choices=("static", "dynamic", "orca", "vllm", "sarathi", "sglang", "penstock"),
    )
    batching: str | None = setting(
        None,
        "When a batch may start.",
        kind=Kind.CHOICE,
        choices=("continuous", "dynamic", "static"),
        default_doc="the preset's: continuous",
    )
    max_batch_size: int | None = setting(
        None,
        "Requests in a static or dynamic batch.",
        kind=Kind.COUNT,
        minimum=1,
        maximum=2048,
        default_doc="half of max_num_seqs; the other half is for padding",
    )
    preferred_batch_sizes: tuple[int, ...] | None = setting(
        None,
        "Sizes at which a dynamic batch starts at once.",
        kind=Kind.COUNTS,
        key="preferred_batch_size",
        minimum=1,
        default_doc="none",
    )
    batch_window_s: float | None = setting(
        None,
        "How long the oldest request of an incomplete static or dynamic batch waits for others.",
        kind=Kind.DURATION,
        key="batch_window",
        minimum=0.0,
        maximum=3600.0,
        default_doc="static 2s, dynamic 20ms",
    )
    length_buckets: tuple[int, ...] | None = setting(
        None,
        "Prompt lengths up to which requests share a dynamic batch and are padded.",
        kind=Kind.COUNTS,
        minimum=1,
        default_doc="128,512,1024,2048",
    )
    policy: str | None = setting(
        None,
        "Who is next among the waiting.",
        kind=Kind.CHOICE,
        choices=("fcfs", "sjf", "srpf", "edf", "priority", "fair"),
        default_doc="the preset's: fcfs",
    )
    length_predictor: str | None = setting(
        None,
        "Who predicts how long an answer will be; some policies ask.",
        kind=Kind.CHOICE,
        choices=("none", "online"),
        default_doc="the preset's: online",
    )
    budget: str | None = setting(
        None,
        "How the tokens of a step are split.",
        kind=Kind.CHOICE,
        choices=("decode-first", "itl", "whole-prompts"),
        default_doc="itl with --slo-itl, else the preset's: itl",
    )
    slo_itl_s: float | None = setting(
        None,
        "Latency between two tokens that 99 of 100 are to keep; prefill chunks are made as small as that needs.",
        kind=Kind.DURATION,
        key="slo_itl",
        minimum=0.001,
        default_doc="50ms, or twice a step without prefills if that is more",
    )
    long_prefill_token_threshold: int | None = setting(
        None,
        "A prompt with more tokens to compute is long: it gets no more of a step, and with itl others pass it.",
        kind=Kind.COUNT,
        minimum=1,
        default_doc="the preset's: 512",
    )
    max_long_partial_prefills: int | None = setting(
        None,
        "Long prompts computed at the same time; shorter ones pass those that wait.",
        kind=Kind.COUNT,
        minimum=1,
        default_doc="the budget's: 1 with itl, else no limit",
    )
    reserve: str | None = setting(
        None,
        "How much memory an admission must find.",
        kind=Kind.CHOICE,
        choices=("chunk", "prompt", "predicted", "no-evict", "watermark"),
        default_doc="the preset's: watermark",
    )
    victim: str | None = setting(
        None,
        "Who is preempted when memory is short.",
        kind=Kind.CHOICE,
        choices=("latest", "lowest-priority", "least-computed", "cheapest"),
        default_doc="lowest-priority with --policy priority, else the preset's: cheapest",
    )
    priority_preemption: bool | None = setting(
        None,
        "With --policy priority, a waiting request pauses a running one of a lower class if it lacks a row or memory.",
        kind=Kind.FLAG,
        default_doc="true with --policy priority, except in a static or dynamic batch",
    )
    preemption: str | None = setting(
        None,
        "What happens to a request whose blocks are taken back.",
        kind=Kind.CHOICE,
        choices=("recompute",),
        default_doc="recompute; with --kv-disk-size or --kv-host-size what takes less time, computing or loading",
    )
    max_num_seqs: int | None = setting(
        None, "Requests in one step at most.", kind=Kind.COUNT, minimum=1, maximum=4096, default_doc="64, on a GPU 256"
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "Tokens computed in one step at most.",
        kind=Kind.COUNT,
        minimum=1,
        maximum=65536,
        default_doc="512, on a GPU 2048",
    )
