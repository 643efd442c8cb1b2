"""The alerts: one entry has the rule and its runbook, so they cannot disagree.

Words between ** in a runbook are titles of panels.
"""

from __future__ import annotations

from dataclasses import dataclass

OBJECTIVE = 0.99
"""Share of requests with a first-token target that should meet it."""
FEWEST_MISSED = 10
"""Misses within an hour that are worth waking somebody. On a quiet server, one is a large share."""


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    query: str
    lasts: str
    """How long the query must have had a result."""
    severity: str
    """`critical`: wake somebody. `warning`: look at it today."""
    summary: str
    means: str
    look: str
    change: str


def _sum(series: str, by: str = "instance, model") -> str:
    return f"sum by ({by}) ({series})"


def _rates(series: str, window: str) -> str:
    return _sum(f"rate(penstock_{series}[{window}])")


def _hits(window: str) -> str:
    return f"{_rates('prefix_cache_hits_total', window)} / {_rates('prefix_cache_queries_total', window)}"


def _burns(window: str, times: float) -> str:
    """Return a query for whether the error budget burns more than `times` as fast as allowed."""
    missed = _sum(f'rate(penstock_slo_attainment_total{{slo="ttft",met="false"}}[{window}])', "model")
    asked = _sum(f'rate(penstock_slo_attainment_total{{slo="ttft"}}[{window}])', "model")
    return f"{missed} / {asked} > {times * (1 - OBJECTIVE):.3g}"


_LOADING = _rates('queue_wait_seconds_total{reason="loading"}', "10m")
_LOADED = _rates('kv_disk_blocks_total{direction="loaded"}', "10m")
_PREFILL = _rates("prefill_time_seconds_sum", "10m")
_ALL = _rates("e2e_request_latency_seconds_sum", "10m")
_STARTS = 'changes(process_start_time_seconds{job="penstock"}[15m])'
_COMPUTED = _rates('prompt_tokens_total{source="computed"}', "10m")

ALERTS = (
    Alert(
        "PenstockQueueDelay",
        f"{_sum('penstock_queue_delay_seconds')} > 10",
        "5m",
        "warning",
        "New requests to {{ $labels.model }} wait {{ $value | humanizeDuration }}.",
        "The queue would take more than ten seconds to drain at the rate of the last half minute.",
        "**Wait of a request, by reason** says what the queue lacks, **Requests** whether it grows.",
        """\
- `rows`: raise `--max-num-seqs`, if **Step time by batch size** is flat.
- `memory`: more KV cache, or a smaller type of it (`--kv-cache-dtype`).
- `tokens`: prompts fill the steps; see `penstock tune`.
- One key has most of **Tokens by key**: let keys take turns (`--policy fair`), or limit it (`--tenant-max-concurrent`).
- `model`: models displace each other, or one is loaded again after a pause: more `--memory`, or `keep_loaded`.
- `loading`: the tier's disk is slow. A faster one (`--kv-disk-path`), or none (`--kv-disk-size 0`).
- Otherwise add servers (**Servers needed**), or refuse sooner (`--max-queue`, `--slo-ttft`).""",
    ),
    Alert(
        "PenstockFirstTokenBudgetBurns",
        f"({_burns('5m', 14.4)}\nand {_burns('1h', 14.4)}\nor {_burns('30m', 6)}\nand {_burns('6h', 6)})\nand "
        + _sum('increase(penstock_slo_attainment_total{slo="ttft",met="false"}[1h])', "model")
        + f" >= {FEWEST_MISSED}",
        "2m",
        "critical",
        "{{ $value | humanizePercentage }} of the calls to {{ $labels.model }} miss their target for the first token.",
        f"""\
At most {1 - OBJECTIVE:.0%} may miss it. That budget was spent 14.4 times as fast for an hour, or 6 times as fast for six
hours, and the last minutes are no better. Ten or more missed it in the last hour. Only the server's target counts
(`--slo-ttft`), not those that clients send.""",
        "**Time to first token** beside **Time of a request**: is it the queue, or the prompt? Else `held_ms` in the log.",
        """\
- The queue: as for PenstockQueueDelay.
- The prompt: smaller steps (`--slo-itl`), or fewer long prompts beside short ones.
- An answer that is held back: a faster verifier, judge or check.""",
    ),
    Alert(
        "PenstockPreemptionStorm",
        f"{_rates('recomputed_tokens_total', '10m')} / {_rates('batch_tokens_sum', '10m')} > 0.1",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the work for {{ $labels.model }} is done twice.",
        "More requests run than the KV cache has blocks for, so they take them from each other, and compute them again.",
        "**Work done twice**, **Preemptions** and **KV cache blocks**.",
        """\
- More KV cache (`--kv-cache-memory`), or a smaller type of it (`--kv-cache-dtype`).
- Fewer rows (`--max-num-seqs`), or admission that reserves more (`--reserve`).
- A tier (`--kv-host-size`) makes preemptions cheap.""",
    ),
    Alert(
        "PenstockHitRateCollapse",
        f"{_hits('30m')}\n< 0.5 * {_hits('6h')}\nand {_hits('6h')} > 0.2\n"
        f"and {_rates('prefix_cache_queries_total', '30m')} > 0.1 * {_rates('prefix_cache_queries_total', '6h')}",
        "15m",
        "warning",
        "The prefix cache of {{ $labels.model }} finds {{ $value | humanizePercentage }} of the tokens, half of before.",
        "Prompts no longer begin alike, or what they share is evicted before it is used again.",
        "**Prefix cache**. `GET /v1/requests/{id}` says of each request why its lookup ended.",
        """\
- Evicted: more KV cache, or a tier (`--kv-disk-size`).
- Differs: prompts begin with something new, such as the time; move it to their end.
- After a restart it passes.""",
    ),
    Alert(
        "PenstockSmallBatches",
        f"{_rates('batch_size_sum', '5m')} / {_rates('batch_size_count', '5m')} < 0.5 * {_sum('penstock_batch_limit_rows')}"
        + "\nand "
        + _sum('avg_over_time(penstock_requests_waiting{reason!="prefix"}[5m])')  # those wait for another one's work
        + " > 1\nand "
        + _rates("generation_tokens_total", "5m")  # steps of texts are small on purpose: larger ones save nothing
        + " > 0",
        "10m",
        "warning",
        "Batches of {{ $labels.model }} have {{ $value | humanize }} requests, half of their limit, while others wait.",
        "Something other than rows keeps requests out of the batch.",
        "**Why batches were no larger**, then **Tokens of a step** and **KV cache blocks** against their limits.",
        """\
- `tokens`: a larger `--max-num-batched-tokens`.
- `memory`: more KV cache (`--kv-cache-memory`).
- `gate`: a shorter `--batch-window`, or `--batching continuous`.
- `adapter`: a larger `--max-loras`.""",
    ),
    Alert(
        "PenstockSlowTier",
        f"({_LOADING} > {_rates('prefix_cache_hits_total', '10m')} * {_PREFILL} / {_COMPUTED}"
        f"\nand {_LOADING} / {_ALL} > 0.1)"
        f"\nor ({_rates('kv_disk_declined_blocks_total', '10m')} > {_LOADED}"
        f"\nand {_PREFILL} / {_ALL} > 0.1)",
        "10m",
        "warning",
        "The tier below the KV cache of {{ $labels.model }} is slower than computing, so it saves no time.",
        """\
Waiting for the tier takes a tenth of the requests' time, and longer than computing what the cache has would take. Or the
server has measured that, and requests compute most of what the tier has, while prompts take a tenth of their time.""",
        "**Wait of a request, by reason** (`loading`), **Blocks to and from the tiers**, and `penstock doctor`.",
        """\
- A faster disk (`--kv-disk-path`).
- More KV cache (`--kv-cache-memory`), so that less is read back.
- Else no tier (`--kv-disk-size 0`).""",
    ),
    Alert(
        "PenstockRestartLoop",
        f"{_sum('increase(penstock_engine_restarts_total[15m])', 'instance')} > 2.5"  # extrapolation makes two 2.01
        f"\nor {_sum(_STARTS, 'instance')} > 2",
        "0m",
        "critical",
        '{{ $labels.instance }} was restarted {{ $value | printf "%.0f" }} times in a quarter of an hour.',
        "The engine fails or hangs again and again, or the whole process ends and is started anew.",
        "The log of the server has the reason. **Resident memory**: did the kernel kill it?",
        """\
- Out of memory: a smaller `--kv-cache-memory`.
- A request that breaks it: `GET /v1/requests` has the last ones.
- Else return to the version before, and report the traceback.""",
    ),
    Alert(
        "PenstockReplicaLost",
        'sum by (instance) (up{job="penstock"}) == 0'
        f"\nor {_sum('penstock_replicas')} < {_sum('penstock_wanted_replicas')}"
        f"\nand {_sum('penstock_replicas')} < {_sum('penstock_wanted_replicas offset 5m')}",  # a new one has time to start
        "2m",
        "critical",
        "{{ $labels.instance }} does not answer, or lacks replicas.",
        "Prometheus cannot scrape the server, or a cluster has had fewer replicas than it wants for some minutes.",
        "`GET /load` lists the replicas. The log of the lost one has the reason.",
        """\
- Ray starts it again if it has the CPUs and the memory. Requests in flight went on elsewhere.
- Until then the others carry the load: `penstock_replicas` of `penstock_wanted_replicas`.""",
    ),
)
