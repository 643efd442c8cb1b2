"""The table of all metrics: `prometheus.py` writes them, the boards and alerts query them, docs/metrics.md explains them."""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "penstock_"


class Spec(NamedTuple):
    kind: str
    """`gauge`, `counter`, `histogram` or `summary` (of a sum and a count)."""
    labels: tuple[str, ...]
    help: str


_TABLE = """\
# Requests
gauge requests_running model | Requests in the batch.
gauge requests_background model | Background requests, running and waiting.
gauge requests_waiting model reason | Waiting requests, by what the first of them waits for.
counter request_success model finish_reason | Requests that ended, by finish reason.
counter requests_rejected model reason | Requests that were refused.
counter slo_attainment model slo met | Calls (ttft; ttft_asked: a client's own) and answers (itl), by whether they met a target.
counter tenant_requests model tenant outcome | Requests of a named key, by outcome.
counter tenant_tokens model tenant kind | Tokens of a named key's requests.
counter prompt_tokens model source | Prompt tokens of requests that got a first token.
counter generation_tokens model | Tokens generated.
counter forced_tokens model | Generated tokens that a grammar forced.
counter guessed_tokens model source position | Guesses that steps checked, by who guessed and place after a row's token.
counter accepted_tokens model source position | Those that the model agreed with.
counter shared_texts model | Texts answered without being computed.
histogram request_prompt_tokens model | Prompt tokens per request, of those that ended.
histogram request_generation_tokens model | Generated tokens per request, of those that ended.
# Latencies
histogram time_to_first_token_seconds model | From arrival to the first token: queue and prefill.
histogram queue_time_seconds model | From arrival to the first step with the request.
histogram prefill_time_seconds model | From the first step with the request to its first token.
histogram decode_time_seconds model | From the first token to the end.
histogram e2e_request_latency_seconds model | From arrival to the end.
histogram time_per_output_token_seconds model | Mean gap between tokens, per request.
histogram inter_token_latency_seconds model | Gaps between two tokens of one request.
counter request_seconds model part | Time of requests that ended: in the queue, in prefill, in decode.
counter queue_wait_seconds model reason | Time in the queue before the first step, by what the queue lacked.
histogram grammar_wait_seconds model | Waits for grammars to compile.
histogram model_wait_seconds model | Successful waits for the model to load.
# Steps
histogram batch_size model | Requests with a row, per step.
histogram batch_tokens model | Positions computed per step.
gauge batch_limit_rows model | Most requests of a step; 0 if unknown.
gauge batch_limit_tokens model | Most positions of a step; 0 if unknown.
counter steps model limit | Steps, by what the first waiting request lacked: why the batch was no larger.
summary step_size_seconds model rows prompts | Duration of steps by rows (at most), with and without prompts.
histogram step_seconds model part | Duration of a step and of its parts.
gauge prefill_chunk_tokens model | Most prompt tokens for the last step.
counter client_wait_seconds model | Time in which streams waited for their clients to read.
counter cpu_seconds state | Time of the CPUs: threads of the server were running, or waiting for one; others were running.
counter background_tokens model | Positions computed for background requests.
counter padding_tokens model | Positions computed as padding.
counter grammar_rows_sat_out model | Rows left out of a step because their grammar masks were not ready.
counter machine_seconds model | Time in which the model's steps used the CPU; 0 if steps take no turns.
counter engine_restarts model | Restarts of the engine after a failure or a hang.
# KV cache
gauge kv_blocks model state | KV cache blocks: free, free with cached content, held by one request, by several, null.
gauge kv_waste_ratio model | Share of the KV positions held by requests that have no token.
gauge kv_usage_ratio model | Share of the KV cache blocks held by requests.
counter prefix_cache_queries model | Tokens looked up in the prefix cache.
counter prefix_cache_hits model | Tokens found in the prefix cache.
counter preemptions model method | Preemptions of running requests.
counter recomputed_tokens model | Positions computed again after a preemption.
gauge kv_disk_up model | 1 while the tier is in use, 0 after too many failures.
gauge kv_disk_slots model state | Slots for blocks in the tier.
counter kv_disk_blocks model direction | KV blocks moved to and from the tier.
counter kv_disk_bytes model direction | Bytes written to and read from the tier.
counter kv_disk_dropped_blocks model | KV blocks not written because too many were being written.
counter kv_disk_declined_blocks model | KV blocks that were computed though the tier has them, because loading takes longer.
counter kv_disk_failures model reason | Failed transfers of KV blocks, by reason.
# Load of the server
gauge arrival_rate_requests_per_second model | Calls without timely retries, mean of 30 s.
gauge drain_rate_requests_per_second model | Rate at which requests ended while others waited.
gauge queue_depth_sustained model | Waiting requests, mean of 30 s.
gauge queue_delay_seconds model | Time to drain the mean queue of 30 s.
gauge utilisation_ratio model | Share of rows or KV blocks used, mean of 30 s; 1 while requests wait.
gauge kv_headroom_ratio model | Share of the KV blocks not held, mean of 30 s.
gauge desired_replicas model | Servers like this one that the load needs.
gauge settings_info model hash | 1, with a hash of the settings.
# Models and memory
gauge weight_bytes model | Size of the weights in memory; 0 if unknown.
gauge memory_bytes model part | Memory that the loaded model may use, by part.
gauge model_state model state | 1 for the state that the model is in.
gauge model_requests_waiting_for_load model | Requests waiting for the model to load.
counter model_loads model result | Loads of the model, by result.
counter model_load_seconds model | Time of successful loads.
counter model_unloads model reason | Unloads of the model.
gauge adapters model place | Adapters in the KV cache (running or idle), and in memory beside it.
gauge adapter_names model | Registered adapters.
gauge adapter_kv_blocks model | KV cache blocks that hold adapters.
gauge adapter_memory_bytes model | Size of adapters in memory beside the KV cache.
counter adapter_loads model result | Adapters read from files.
counter adapter_load_seconds model | Time to read, check and pack adapters.
counter adapter_placements model | Adapters copied into the KV cache.
counter adapter_evictions model place | Evicted adapters.
# Routes, traces, batches, replicas
counter routed_requests model route | Requests for which a route chose this model.
counter checked_answers model pipeline result | Answers of this model that a pipeline has checked: kept or withheld.
counter route_cost_dollars route model | Cost of answers and of those begun in vain, by the prices of the route.
counter route_full_cost_dollars route | Cost of the same answers at the dearest model of the route.
gauge route_drift_ratio route | Distance between the gains of the last questions and those of the fit.
counter upstream_requests upstream result | Requests to a model of another server, by how they ended.
counter upstream_tokens upstream kind | Tokens of prompts and answers, as the upstream counts them.
gauge upstream_resting upstream | 1 while the upstream is left alone, since it failed.
counter traced_requests result | Requests to be traced, by whether the collector got them.
counter job_lines result | Lines of batches, by how they ended.
counter job_tokens kind | Tokens of batches: input, those of them that were cached, and output.
gauge job_lines_left | Lines that have no answer.
gauge jobs | Batches that have not ended.
gauge replicas model | Replicas that take requests.
gauge wanted_replicas model | Replicas that there should be.
gauge replica_requests_running model replica | Requests in a replica's batch.
gauge replica_kv_usage_ratio model replica | Share of a replica's KV blocks held by requests.
gauge replica_tokens_left model replica | Tokens that a replica has yet to compute.
counter replica_copied_tokens model replica | Tokens whose KV a replica copied from another.
counter requests_moved model reason | Requests that went on at another replica.
"""
"""A line for each: kind, name, labels, and the help. A host tier has the metrics of a disk tier."""


def _read() -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    for line in _TABLE.strip().splitlines():
        if not line.startswith("#"):
            words, _, text = line.partition(" | ")
            kind, name, *labels = words.split()
            specs[name] = Spec(kind, tuple(labels), text)
    tier = {name: spec for name, spec in specs.items() if name.startswith("kv_disk_")}
    return specs | {name.replace("disk", "host"): spec for name, spec in tier.items()}


METRICS = _read()
"""By name, without `PREFIX` and without the `_total` of a counter."""
