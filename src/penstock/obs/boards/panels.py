"""The board: its rows are the questions of an operator, its panels the answers."""

from __future__ import annotations

from dataclasses import dataclass

_M = 'model=~"$model"'
_DECODES = ',prompts="no"'

Query = tuple[str, str]
"""(PromQL, legend). Variables: `$model`, `$__rate_interval`."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: str
    """Grafana's name of the unit."""
    description: str
    queries: tuple[Query, ...]
    is_stacked: bool = False


def _lines(title: str, unit: str, description: str, *queries: Query) -> Panel:
    return Panel(title, unit, description, queries)


def _stack(title: str, unit: str, description: str, *queries: Query) -> Panel:
    return Panel(title, unit, description, queries, is_stacked=True)


def _gauge(name: str, by: str = "", of: str = "sum") -> str:
    return f"{of}{f' by ({by})' if by else ''} (penstock_{name}{{{_M}}})"


def _rate(name: str, by: str = "", where: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(penstock_{name}{{{_M}{where}}}[$__rate_interval]))"


def _ratio(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


def _mean(name: str) -> str:
    return _ratio(f"{name}_sum", f"{name}_count")


def _shares(name: str, by: str, whole: str) -> Query:
    return f"{_rate(name, by)} / scalar({_rate(whole)})", f"{{{{{by}}}}}"


def _quantiles(histogram: str) -> tuple[Query, ...]:
    buckets = _rate(f"{histogram}_bucket", "le")
    return tuple([(f"histogram_quantile({share / 100:g}, {buckets})", f"p{share}") for share in (50, 90, 99)])


BOARD: tuple[str | Panel, ...] = (
    "Are people waiting, and why?",
    _lines(
        "Time to first token",
        "s",
        "From arrival to the first token: the wait in the queue, and the prompt. Points are examples of requests.",
        *_quantiles("time_to_first_token_seconds"),
    ),
    _stack(
        "Requests",
        "short",
        "In the batch, and waiting by what the first of them lacks.",
        (_gauge("requests_running"), "running"),
        (_gauge("requests_waiting", "reason"), "waiting: {{reason}}"),
        (_gauge("requests_background"), "background"),
    ),
    _stack(
        "Wait of a request, by reason",
        "s",
        "Mean time in the queue, by what it lacked. `gate`: the price of waiting for a batch. `step`: the step under way, and "
        "reading the prompt.",
        _shares("queue_wait_seconds_total", "reason", "queue_time_seconds_count"),
    ),
    _lines(
        "Targets met",
        "percentunit",
        "Share of the calls that met a target for the first token (`ttft`), and of the answers that met one for gaps (`itl`).",
        # A target that no request has is left out: its share would be 0 / 0.
        (_rate("slo_attainment_total", "slo", ',met="true"') + f" / ({_rate('slo_attainment_total', 'slo')} > 0)", "{{slo}}"),
    ),
    _stack(
        "Refused and failed",
        "reqps",
        "Requests that got no answer, by reason.",
        (_rate("requests_rejected_total", "reason"), "refused: {{reason}}"),
        (_rate("request_success_total", "finish_reason", ',finish_reason=~"abort|error"'), "{{finish_reason}}"),
    ),
    _lines(
        "Queue delay",
        "s",
        "How long a new request would wait, if the queue drains as in the last half minute.",
        (_gauge("queue_delay_seconds", "model", "max"), "{{model}}"),
    ),
    "How full are the batches?",
    _lines(
        "Batch size",
        "short",
        "Mean requests of a step, and the most that the settings allow.",
        (_mean("batch_size"), "requests"),
        (_gauge("batch_limit_rows", of="max"), "limit"),
    ),
    _stack(
        "Why batches were no larger",
        "percentunit",
        "Share of the steps by what the first waiting request lacked; `step`: nobody waited, or only for this step.",
        _shares("steps_total", "limit", "steps_total"),
    ),
    _lines(
        "Step time by batch size",
        "s",
        "Mean duration of steps without prompts, by their rows (at most). Flat: a larger batch costs nothing.",
        (
            _rate("step_size_seconds_sum", "rows", _DECODES) + " / " + _rate("step_size_seconds_count", "rows", _DECODES),
            "{{rows}} rows",
        ),
    ),
    _lines(
        "Tokens of a step",
        "short",
        "Mean positions computed per step, padding among them, and the most that the settings allow.",
        (_mean("batch_tokens"), "positions"),
        (_ratio("padding_tokens_total", "batch_tokens_count"), "padding"),
        (_gauge("batch_limit_tokens", of="max"), "limit"),
    ),
    "Where does the time go?",
    _stack(
        "Time of a request",
        "s",
        "Mean time of requests that ended: in the queue, for the prompt, for the answer.",
        _shares("request_seconds_total", "part", "e2e_request_latency_seconds_count"),
    ),
    _lines(
        "Gap between tokens",
        "s",
        "Every gap between two tokens of a request.",
        *_quantiles("inter_token_latency_seconds"),
    ),
    _lines(
        "Parts of a step",
        "percentunit",
        "Share of the time. `execute` is computing, which a backend may divide; the others run on the host.",
        (_rate("step_seconds_sum", "part", ',part!="total"'), "{{part}}"),
    ),
    _lines(
        "Throughput",
        "short",
        "Tokens per second: prompts computed, prompts found in the prefix cache, answers.",
        (_rate("prompt_tokens_total", "source"), "prompt, {{source}}"),
        (_rate("generation_tokens_total"), "answers"),
    ),
    _stack(
        "Tokens without a step of their own",
        "short",
        "Guessed tokens per second, by guesser. `grammar` counts tokens that a grammar forced.",
        (_rate("accepted_tokens_total", "source"), "{{source}}"),
        (_rate("forced_tokens_total"), "grammar"),
    ),
    _lines(
        "Guesses that held",
        "percentunit",
        "Share of the guesses that the model agreed with, by who guessed.",
        (_rate("accepted_tokens_total", "source") + " / " + _rate("guessed_tokens_total", "source"), "{{source}}"),
    ),
    _stack(
        "Tokens by key",
        "short",
        "Tokens per second, of prompts and answers, for keys with names (`--api-keys-file`).",
        (_rate("tenant_tokens_total", "tenant"), "{{tenant}}"),
    ),
    "Memory",
    _stack(
        "KV cache blocks",
        "short",
        "By state; free and cached ones can be taken at once.",
        (_gauge("kv_blocks", "state"), "{{state}}"),
    ),
    _lines(
        "Work done twice",
        "percentunit",
        "Share of the positions that were computed again, since a preemption took their blocks.",
        (_ratio("recomputed_tokens_total", "batch_tokens_sum"), "computed again"),
    ),
    _lines(
        "Preemptions",
        "reqps",
        "Running requests that lost their blocks.",
        (_rate("preemptions_total", "method"), "{{method}}"),
    ),
    _lines(
        "Waste and headroom",
        "percentunit",
        "Held KV positions without a token, and blocks that nobody holds.",
        (_gauge("kv_waste_ratio", of="max"), "waste"),
        (_gauge("kv_headroom_ratio", of="min"), "headroom"),
    ),
    "Cache",
    _lines(
        "Prefix cache",
        "percentunit",
        "Share of the looked-up tokens that were found.",
        (_ratio("prefix_cache_hits_total", "prefix_cache_queries_total"), "found"),
    ),
    _lines(
        "Blocks to and from the tiers",
        "short",
        "Per second, with `--kv-disk-size` or `--kv-host-size`.",
        (_rate("kv_disk_blocks_total", "direction"), "disk: {{direction}}"),
        (_rate("kv_disk_declined_blocks_total"), "disk: declined"),
        (_rate("kv_host_blocks_total", "direction"), "host: {{direction}}"),
        (_rate("kv_host_declined_blocks_total"), "host: declined"),
    ),
    "Machine",
    _lines(
        "Processors",
        "short",
        "Cores that the server's process used.",
        ('sum by (instance) (rate(process_cpu_seconds_total{job="penstock"}[$__rate_interval]))', "{{instance}}"),
    ),
    _lines(
        "Resident memory",
        "bytes",
        "Of the server's process, and of the weights.",
        ('sum by (instance) (process_resident_memory_bytes{job="penstock"})', "{{instance}}"),
        (_gauge("weight_bytes"), "weights"),
    ),
    _lines(
        "Servers needed",
        "short",
        "Servers like these that the load needs, and times that the engine was restarted.",
        (f"sum(max by (instance) (penstock_desired_replicas{{{_M}}}))", "needed"),  # of its models the busiest counts
        (f"sum(increase(penstock_engine_restarts_total{{{_M}}}[$__rate_interval]))", "restarts"),
    ),
)
