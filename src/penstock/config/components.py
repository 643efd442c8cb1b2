"""The server's settings in groups: a class per component, and `Config`, which has one of each.

A field's one-line doc is what `--help` and docs/configuration.md show.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from penstock.config.setting import (
    Component,
    choice,
    count,
    counts,
    duration,
    flag,
    path,
    port_number,
    setting,
    settings_of,
    share,
    size,
    table,
)
from penstock.types.adapter import MergedAdapter
from penstock.types.errors import ConfigError
from penstock.types.tenant_limits import TenantLimits

DEFAULT_MODEL = "smollm2:135m"


def _arguments_of(option: str) -> Any:
    return table(None, f"Arguments for {option}, by name.", default_doc="its own defaults")


TOOL_PARSERS = (
    *("auto", "apriel", "hermes", "qwen3_coder", "glm45", "seed_oss", "minimax_m2", "nemotron_json", "deepseek_v3"),
    *("deepseek_v31", "llama3_json", "mistral", "mistral_args", "phi4_mini_json", "granite", "openai", "generic"),
)
REASONING_PARSERS = ("auto", "none", "think", "seed_oss", "gemma4", "mistral", "openai")
"""The names of the dialects in `text.dialects`. A test keeps both equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Component):
    """Settings that choose the model and how clients see it."""

    title: ClassVar[str] = "Model"

    model: str = setting(DEFAULT_MODEL, "Catalogue name, .gguf file, Hugging Face directory, or hf:org/repo[:file].")
    cache_dir: str | None = path(
        None, "Folder for fetched weights.", key="cache", default_doc="$XDG_CACHE_HOME/penstock or ~/.cache/penstock"
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        "Name that clients use; may be repeated.",
        key="served_model_name",
        default_doc="the catalogue's name, the file's without .gguf, or the directory's",
        is_multiple=True,
    )
    chat_template: str | None = setting(
        None,
        "Name of a chat template (the model's or a built-in one), a Jinja2 file, or the template's text.",
        default_doc="the model's own",
    )
    tool_call_parser: str = choice(
        "auto", "Format of the model's tool calls. auto: detected from its chat template.", choices=TOOL_PARSERS
    )
    reasoning_parser: str = choice(
        "auto",
        "Format of the model's reasoning block. auto: detected from its chat template. none: it stays in the content.",
        choices=REASONING_PARSERS,
    )
    generation_config: str = setting(
        "auto",
        "Where sampling parameters come from that a request leaves out: auto (the model's own files), none, or a folder with a "
        "generation_config.json.",
    )
    max_model_len: int | None = count(
        None,
        "Longest prompt + output of one request, in tokens.",
        minimum=1,
        default_doc="the model's, or less if memory cannot hold it",
    )
    task: str = choice(
        "auto",
        "Use of the model: generate writes text; embed, rerank and classify turn texts into numbers. auto: as its files say.",
        choices=("auto", "generate", "embed", "rerank", "classify"),
    )
    pooling: str | None = choice(
        None,
        "How an encoder's token vectors are pooled: first token, last token, mean, or each (a vector per token).",
        choices=("first", "last", "mean", "each"),
        default_doc="as the model's files say",
    )
    experts_on_disk: bool = flag(
        False,
        "Keep experts in a file beside the fetched weights; memory holds as many as it has room for. CPU only.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig(Component):
    """Settings of the KV cache: its size, sharing and tiers."""

    title: ClassVar[str] = "KV cache"

    block_size: int = count(16, "KV positions per block.", minimum=1, maximum=256)
    kv_cache_memory_bytes: int | None = size(
        None,
        "Memory for keys and values.",
        minimum=1,
        default_doc="half the memory left after the weights, capped at 4GiB and what --max-num-seqs requests can use; on a "
        "GPU, what --gpu-memory-utilization leaves",
    )
    gpu_memory_utilization: float | None = share(
        None,
        "Share of a GPU's memory for this server: weights, the largest step, the rest for keys and values.",
        minimum=0.01,
        maximum=1.0,
        default_doc="90%",
    )
    kv_cache_dtype: str | None = choice(
        None,
        "Type of the stored keys and values; bf16 takes twice the memory, int4 (CPU only) 55% of it.",
        choices=("int8", "bf16", "int4"),
        default_doc="int8, on a GPU bf16",
    )
    prefix_caching: bool = flag(True, "Reuse the KV of prompts that begin alike.")
    prefix_sharing: str | None = choice(
        None,
        "Share cached prefixes among all tenants, or within each.",
        choices=("all", "tenant"),
        default_doc="tenant with several API keys, a key file or --trust-tenant-header, else all",
    )
    kv_eviction: str | None = choice(
        None,
        "Which cached prefixes are evicted first.",
        choices=("lru", "priority", "tenant-fair"),
        takes_class=True,
        default_doc="priority with --policy priority; tenant-fair with --policy fair, several API keys, a file of keys or "
        "--trust-tenant-header; else the preset's: lru",
    )
    kv_eviction_args: Mapping[str, object] | None = _arguments_of("--kv-eviction")
    kv_rest_s: float | None = duration(
        None,
        "How much longer cached prefixes of conversations are kept than others; 0: no longer.",
        minimum=0.0,
        default_doc="10s",
    )
    kv_host_size_bytes: int = size(0, "Host memory for KV blocks evicted or preempted on a GPU; 0: none.", minimum=0)
    kv_disk_size_bytes: int = size(0, "Maximum size of a disk file for evicted or preempted KV blocks; 0: none.", minimum=0)
    kv_disk_path: str | None = path(
        None,
        "Folder of the --kv-disk-size file, reused after a restart; one server at a time.",
        default_doc="`kv` in the folder for fetched weights; with several models, one subfolder each",
    )
    kv_watermark: float | None = share(
        None,
        "Share of the blocks kept free when a waiting request begins to run.",
        minimum=0.0,
        maximum=0.9,
        default_doc="the preset's: 1%",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(Component):
    """Settings of LoRA adapters, which requests choose by name."""

    title: ClassVar[str] = "Adapters"

    lora_modules: tuple[str, ...] = setting(
        (), "NAME=PATH of an adapter: a folder of PEFT or a .gguf file; may be repeated.", is_multiple=True
    )
    lora_dir: str | None = path(None, "Folder of adapters: other names are looked up there when they are requested.")
    merge_lora: tuple[str, ...] = path(
        (),
        "PATH or PATH:WEIGHT of an adapter to merge into the model at load; may be repeated.",
        is_multiple=True,
    )
    max_loras: int = count(32, "Different adapters among the requests that run at once.", minimum=1, maximum=4096)
    max_lora_rank: int = count(64, "Greatest rank of an adapter.", minimum=1, maximum=256)
    max_cpu_loras: int = count(
        64, "Adapters kept in memory beside the KV cache; others are read again.", minimum=1, maximum=100_000
    )

    @property
    def is_on(self) -> bool:
        return bool(self.lora_modules) or self.lora_dir is not None

    @property
    def merged(self) -> tuple[MergedAdapter, ...]:
        """The adapters of `merge_lora`. Raises ConfigError for a weight that changes nothing or everything."""
        found = []
        for text in self.merge_lora:
            match = re.fullmatch(r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)", text)
            weight = float(match[2]) if match else 1.0
            if not weight or not math.isfinite(weight):
                raise ConfigError(f"merge_lora: the weight of {text} is {weight:g}.", remedy="Give another, or leave it out.")
            found.append(MergedAdapter(match[1] if match else text, weight))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Component):
    """Settings that decide which requests run when, and in which batch."""

    title: ClassVar[str] = "Scheduling"

    preset: str | None = choice(
        None,
        "Named bundle of policies.",
        choices=("static", "dynamic", "orca", "vllm", "sarathi", "sglang", "penstock", "offline", "texts"),
        default_doc="penstock; texts for an embedding, reranking or classification model",
    )
    batching: str | None = choice(
        None,
        "When a batch may start.",
        choices=("continuous", "dynamic", "static"),
        takes_class=True,
        default_doc="the preset's: continuous",
    )
    batching_args: Mapping[str, object] | None = _arguments_of("--batching")
    max_batch_size: int | None = count(
        None,
        "Requests in a static or dynamic batch.",
        minimum=1,
        maximum=2048,
        default_doc="half of max_num_seqs; the other half is for padding",
    )
    preferred_batch_sizes: tuple[int, ...] | None = counts(
        None, "Sizes at which a dynamic batch starts at once.", key="preferred_batch_size", minimum=1
    )
    batch_window_s: float | None = duration(
        None,
        "How long the oldest request of an incomplete static or dynamic batch waits for others.",
        minimum=0.0,
        maximum=3600.0,
        default_doc="static 2s, dynamic 20ms",
    )
    length_buckets: tuple[int, ...] | None = counts(
        None,
        "Upper limits of prompt-length buckets. A dynamic batch is one bucket, padded.",
        minimum=1,
        default_doc="128,512,1024,2048",
    )
    policy: str | None = choice(
        None,
        "Which waiting request is next.",
        choices=("fcfs", "sjf", "srpf", "edf", "priority", "fair", "calls"),
        takes_class=True,
        default_doc="the preset's: fcfs; calls for texts",
    )
    policy_args: Mapping[str, object] | None = _arguments_of("--policy")
    length_predictor: str | None = choice(
        None,
        "How the length of an answer is predicted.",
        choices=("none", "online"),
        takes_class=True,
        default_doc="the preset's: online",
    )
    length_predictor_args: Mapping[str, object] | None = _arguments_of("--length-predictor")
    speculation: str | None = choice(
        None,
        "How speculative decoding guesses the next tokens, to verify them in one step.",
        choices=("off", "suffix"),
        takes_class=True,
        default_doc="the preset's: suffix",
    )
    speculation_args: Mapping[str, object] | None = _arguments_of("--speculation")
    speculation_model: str | None = setting(
        None,
        "Small draft model with the same vocabulary, or draft head (EAGLE-3) of the model, given like MODEL. It guesses where "
        "--speculation does not. CPU only.",
    )
    budget: str | None = choice(
        None,
        "How the tokens of a step are split.",
        choices=("decode-first", "hold-step", "itl", "prefill-first", "whole-prompts"),
        takes_class=True,
        default_doc="itl with --slo-itl, else the preset's: itl; hold-step for texts",
    )
    budget_args: Mapping[str, object] | None = _arguments_of("--budget")
    slo_itl_s: float | None = duration(
        None,
        "Target for the p99 time between two tokens; prefill chunks shrink to meet it.",
        minimum=0.001,
        default_doc="50ms, or twice a decode-only step if that is longer",
    )
    background_share: float = share(
        0.0,
        "Approximate minimum share of time for requests of /v1/batches, with continuous batching, if memory allows.",
        minimum=0.0,
        maximum=0.9,
    )
    long_prefill_token_threshold: int | None = count(
        None,
        "Prompts with more tokens to compute are long: with itl, others overtake them; else a step computes at most this many.",
        minimum=1,
        default_doc="the preset's: 512",
    )
    max_long_partial_prefills: int | None = count(
        None,
        "Long prompts computed at the same time; shorter ones pass those that wait.",
        minimum=1,
        default_doc="the budget's: 1 with itl, else no limit",
    )
    reserve: str | None = choice(
        None,
        "Free memory required to admit a request.",
        choices=("chunk", "prompt", "predicted", "no-evict", "watermark"),
        takes_class=True,
        default_doc="the preset's: watermark",
    )
    reserve_args: Mapping[str, object] | None = _arguments_of("--reserve")
    victim: str | None = choice(
        None,
        "Which running request is preempted when memory is short.",
        choices=("latest", "lowest-priority", "least-computed", "least-output", "cheapest"),
        takes_class=True,
        default_doc="lowest-priority with --policy priority, else the preset's: cheapest",
    )
    victim_args: Mapping[str, object] | None = _arguments_of("--victim")
    priority_preemption: bool | None = flag(
        None,
        "With --policy priority, a waiting request preempts one of lower priority when rows or memory run out.",
        default_doc="true with --policy priority, except in a static or dynamic batch",
    )
    max_num_seqs: int | None = count(
        None, "Requests in one step at most.", minimum=1, maximum=4096, default_doc="64, on a GPU 256"
    )
    max_num_batched_tokens: int | None = count(
        None, "Tokens computed in one step at most.", minimum=1, maximum=65536, default_doc="512, on a GPU 2048"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig(Component):
    """Settings that limit which requests are admitted. docs/admission.md says what each check does."""

    title: ClassVar[str] = "Admission"

    max_queue: int = count(1024, "Requests that may wait; further ones get a 429.", minimum=1)
    slo_ttft_s: float | None = duration(
        None,
        "Target of the time to first token; a request that is expected to wait longer is answered 429.",
        minimum=0.001,
        default_doc="none: no request is turned away for its wait",
    )
    kv_headroom: float = share(
        0.2,
        "Share of KV blocks that must stay free, or requests with a TTFT target get a 429; 0: they wait.",
        minimum=0.0,
        maximum=0.9,
    )
    tenant_max_concurrent: int | None = count(
        None, "Requests of one tenant that may run or wait; more are answered 429.", minimum=1
    )
    tenant_tokens_per_minute: int | None = count(
        None, "Tokens, prompt and output, that one tenant may use; more are answered 429.", minimum=1
    )

    @property
    def tenant_limits(self) -> TenantLimits:
        """Limits of tenants that have none of their own."""
        return TenantLimits(max_concurrent=self.tenant_max_concurrent, tokens_per_minute=self.tenant_tokens_per_minute)


class Load(StrEnum):
    """Values of `load_on`: when a model is loaded."""

    START = "start"
    REQUEST = "request"


class Backend(StrEnum):
    """The implementation that computes the model. `reference` is the slow specification, offered for learning and for tests."""

    NATIVE = "native"
    REFERENCE = "reference"
    CUDA = "cuda"


class Device(StrEnum):
    """The device that computes. `auto`: a GPU if one is usable."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class AttentionKernels(StrEnum):
    """Kernels that compute attention on a GPU. `auto`: FlashInfer's where they are installed and measured to be faster."""

    AUTO = "auto"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig(Component):
    """Settings of the code and the device that compute the model."""

    title: ClassVar[str] = "Compute"

    device: str = choice(
        Device.AUTO.value,
        "Where to compute: cuda is an NVIDIA GPU; auto uses one if available, unless a CPU-only setting is given.",
        choices=tuple(Device),
    )
    backend: str | None = choice(
        None,
        "native: C++ kernels on the CPU; reference: NumPy, slow, for learning; cuda: Triton kernels on a GPU.",
        choices=tuple(Backend),
        default_doc="the device's: native on the CPU, cuda on a GPU",
    )
    threads: int | None = count(
        None,
        "Threads that compute on the CPU.",
        minimum=1,
        maximum=1024,
        default_doc="one per physical core, without efficiency cores, within the container's quota; `penstock env` shows it",
    )
    pin_threads: bool = flag(
        False,
        "Pin all threads but the engine's to cores: for a server with exclusive cores and a thread for each.",
    )
    kernels: str | None = choice(
        None,
        "Instruction set of the kernels on the CPU, used without a self-test. amx: Intel's tiles; avx512: with VNNI and bf16; "
        "neon: Arm's, with dot products.",
        choices=("amx", "avx512", "avx512-vnni", "avx2-vnni", "avx2", "neon-i8mm", "neon", "portable"),
        default_doc="the machine's best; `penstock env` shows it",
    )
    weight_dtype: str | None = choice(
        None,
        "Type for floating-point weights, except embeddings and logits. fp8: on a GPU. int8, bf16: for encoders on the CPU.",
        choices=("fp8", "int8", "bf16"),
        default_doc="the file's, with 16- and 32-bit floats as bf16; int8 for encoders on the CPU",
    )
    deterministic: bool | None = flag(
        None,
        "The same answer whatever else is in the batch; it costs speed on a GPU, and is always so on the CPU.",
        default_doc="true, on a GPU false",
    )
    cuda_graphs: bool | None = flag(
        None, "Steps that only decode are launched on the GPU as one recorded graph.", default_doc="true on a GPU"
    )
    attention: str | None = choice(
        None,
        "Kernels that compute attention on a GPU: auto tries FlashInfer's at the start, if the extra is installed, and takes "
        "them where they give the same answers and are faster.",
        choices=tuple(AttentionKernels),
        default_doc="auto on a GPU",
    )
    steps_in_flight: int | None = count(
        None, "With 2, the GPU computes a step while the next one is planned.", minimum=1, maximum=2, default_doc="2 on a GPU"
    )
    step_timeout_s: float | None = duration(
        None,
        "A step that takes longer is stuck: its requests end with an error, and the engine restarts.",
        minimum=1.0,
        default_doc="120s, with the reference backend none",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Component):
    """Settings of the HTTP server."""

    title: ClassVar[str] = "Server"

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 is every network.")
    port: int = port_number(8000, "Port to listen on; 0 takes a free one.")
    api_keys: tuple[str, ...] = setting(
        (),
        "Key that clients must send; may be repeated.",
        key="api_key",
        default_doc="no key is asked for",
        is_multiple=True,
        is_secret=True,
    )
    api_key_file: str | None = path(None, "File with one key per line; # begins a comment.")
    api_keys_file: str | None = path(None, "TOML file of keys with names, and limits of their own; read again when it changes.")
    admin_api_keys: tuple[str, ...] = setting(
        (),
        "Admin key: models, adapters, updates, traces; may be repeated. It opens everything else, too.",
        key="admin_api_key",
        default_doc="none: everybody is admin without keys, nobody with --api-key",
        is_multiple=True,
        is_secret=True,
    )
    trust_tenant_header: bool = flag(
        False, "With API keys, take a call's tenant from X-Tenant, not from the key. For gateways that set the header."
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "Web origin that CORS allows, such as https://example.org or a bare host; may be repeated; * allows any.",
        default_doc="none: browsers block other sites' pages",
        is_multiple=True,
    )
    page: bool = flag(True, "The page at /, to chat in a browser and to watch the server.")
    metrics_compat: str = choice(
        "none", "GET /metrics also has vLLM's metric names, for its dashboards and for gateways.", choices=("none", "vllm")
    )
    ssl_certfile: str | None = path(None, "TLS certificate (PEM).", default_doc="none: plain HTTP")
    ssl_keyfile: str | None = path(None, "TLS private key (PEM).")
    max_connections: int | None = count(
        None,
        "Most connections with an active request. Beyond it, idle connections are closed for new ones, and requests get a 503.",
        minimum=1,
        default_doc="8192, or fewer if the open-file limit requires it",
    )
    max_body_bytes: int = size(4 << 20, "Largest request body; a larger one gets a 413.", key="max_body_size", minimum=1024)
    ignore_unknown_parameters: bool = flag(
        False, "Accept requests with unknown parameters, instead of a 400. Each name is logged once."
    )
    seed: int | None = count(
        None,
        "Makes answers repeatable: requests without a seed draw theirs from this one, in order of arrival.",
        minimum=0,
        default_doc="from the system's entropy",
    )
    embedding_cache_bytes: int = size(
        0, "Memory for an encoder's most recent results, for each model; 0: none is kept.", minimum=0
    )
    response_store_bytes: int = size(
        64 << 20,
        "Memory for kept responses (POST /v1/responses); 0: none is kept, and those in --jobs-dir are deleted.",
        minimum=0,
    )
    jobs_dir: str | None = path(
        None, "Folder for files and batches (/v1/files, /v1/batches).", default_doc="none: they are off"
    )
    jobs_bytes: int = size(8 << 30, "Most bytes in the files of one API key.", key="jobs_bytes", minimum=1024)
    batch_hours: str | None = setting(
        None, "Hours of the day in which lines of batches begin, such as 22-6.", default_doc="always"
    )
    webhook_url: str | None = setting(None, "URL that gets an event when a batch or a background response ends.")
    webhook_secret: str | None = setting(None, "Secret that signs these events: whsec_ and base64.", is_secret=True)
    response_ttl_s: float = duration(86400.0, "Time since its last use after which a kept response is forgotten.", minimum=1.0)
    explained_requests: int = count(
        1000,
        "Ended requests that GET /v1/requests/{id} still explains; 0: none is explained, not even one that runs.",
        minimum=0,
        maximum=100_000,
    )
    log_requests: float = share(
        0.0,
        "Share of requests to log when they finish: client, path, status, times and tokens.",
        minimum=0.0,
        maximum=1.0,
    )
    slow_request_s: float | None = duration(
        None, "Log each request that took longer, with an explanation.", key="log_slow_requests", minimum=0.0
    )
    otlp_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP) that gets traces of requests.",
        default_doc="OTEL_EXPORTER_OTLP_ENDPOINT; without it, no traces",
    )
    trace_sample: float = share(
        1.0,
        "Share of requests to trace if the client's traceparent does not decide.",
        minimum=0.0,
        maximum=1.0,
    )
    request_timeout_s: float | None = duration(
        None, "Longest time that a request may take, its wait included; a client may ask for less.", minimum=0.001
    )
    queue_timeout_s: float | None = duration(
        None, "Longest time that a request may wait for its turn; a client may ask for less.", minimum=0.001
    )
    first_token_timeout_s: float | None = duration(
        None, "Longest time to the first token; a client may ask for less.", minimum=0.001
    )
    load_timeout_s: float = duration(
        60.0, "Longest time that a request may wait for its model to load; then it gets a 503.", minimum=0.0
    )
    record: str | None = path(None, "File to which arrivals, lengths, plans and durations are written, without any text.")
    record_size_bytes: int = size(
        256 << 20, "Largest size of the recording; the oldest of its four parts is dropped for a new one.", minimum=16 << 20
    )
    record_tenant_names: bool = flag(
        False, "The recording has the names of tenants, instead of numbers, and of policies of your own."
    )
    kv_events: str | None = setting(
        None, "Address and port where changes of the prefix cache are published for routers, in vLLM's form."
    )
    kv_events_topic: str | None = setting(None, "Topic of these messages.", default_doc="an empty one")
    shutdown_timeout_s: float = duration(30.0, "After SIGTERM, how long running requests may take to finish.", minimum=0.0)

    def check_jobs(self) -> None:
        """Raise ConfigError for settings that need `jobs_dir`, if it is not set."""
        for name, value in (("--webhook-url", self.webhook_url), ("--batch-hours", self.batch_hours)):
            if value is not None and self.jobs_dir is None:
                raise ConfigError(f"{name} needs --jobs-dir, which is not set.", remedy="Set --jobs-dir.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingConfig(Component):
    """Settings of how a server's models share the machine. docs/how-to/several-models.md shows how several are served."""

    title: ClassVar[str] = "Several models"

    models_dir: str | None = path(
        None,
        "Folder whose .gguf files and Hugging Face directories are served too, including later additions: each under its "
        "name, loaded on request.",
    )
    memory_bytes: int | None = size(
        None,
        "Memory for all models together. A model without room waits until others unload.",
        minimum=1,
        default_doc="what is free at startup",
    )
    aliases: tuple[str, ...] = setting(
        (),
        "Additional name of the model, accepted but not listed; may be repeated.",
        key="alias",
        default_doc="the catalogue's, and MODEL as written, unless --served-model-name is given",
        is_multiple=True,
    )
    load_on: str = choice(
        Load.START.value,
        "When the model is loaded: as the server starts, or when a request asks for it. Those of --models-dir: request.",
        choices=tuple(Load),
    )
    idle_unload_s: float | None = duration(
        None,
        "Time without requests after which the model leaves memory; the next request loads it again.",
        minimum=1.0,
        default_doc="it stays until another needs the memory",
    )
    keep_loaded: bool = flag(False, "Never unload the model for another one.")
    machine_share: float = share(
        1.0,
        "The model's weight when models compete for CPU time: 2 gets twice as much as 1.",
        minimum=0.05,
        maximum=20.0,
    )
    split_of: str | None = setting(
        None,
        "Name of another model; this one answers a part of its requests.",
    )
    split_share: float | None = share(
        None, "Share of the other model's users that this one serves.", minimum=0.0, maximum=1.0, default_doc="0"
    )
    split_tenants: tuple[str, ...] = setting(
        (), "Tenant that this model always serves; may be repeated.", key="split_tenant", is_multiple=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(Component):
    """Settings of `penstock cluster`: replicas of one model behind one server."""

    title: ClassVar[str] = "Cluster"

    replicas: int = count(
        2,
        "Replicas of the model, each a process with its own KV cache; with --max-replicas, the fewest.",
        minimum=0,
        maximum=1024,
    )
    max_replicas: int | None = count(
        None, "Most replicas: their number follows the load.", minimum=1, maximum=1024, default_doc="as --replicas"
    )
    router: str = setting(
        "prefix", "Chooses the replica of a request: prefix, least-work, round-robin, or your own, as module:Class."
    )
    resume: bool = flag(True, "Let an answer go on at another replica if its own is lost. Else it ends with an error.")
    replica_host: str = setting("127.0.0.1", "Address at which replicas reach the server. With several machines, no loopback.")

    def __post_init__(self) -> None:
        Component.__post_init__(self)
        if self.most < max(1, self.replicas):
            raise ConfigError(
                f"replicas is {self.replicas}, and max_replicas {self.most}.",
                remedy="Set --replicas to 1 or more, or --max-replicas to at least as many.",
            )

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(Component):
    """Settings of the log on stderr."""

    title: ClassVar[str] = "Log"

    log_level: str = choice(LogLevel.INFO.value, "Least important lines that are written.", choices=tuple(LogLevel))
    log_format: str = choice(LogFormat.TEXT.value, "How log lines look.", choices=tuple(LogFormat))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of a server with one model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    sharing: SharingConfig = field(default_factory=SharingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log: LogConfig = field(default_factory=LogConfig)


COMPONENTS: tuple[tuple[str, type[Component]], ...] = tuple((part.name, part.default_factory) for part in fields(Config))  # type: ignore[misc]
"""Pairs of a field of `Config` and its class, in the order of help and docs."""


def config_from(values: Mapping[str, object]) -> Config:
    """Return a config from key -> value, with defaults for other settings. Unknown keys are ignored."""
    parts: dict[str, Any] = {}
    for name, component in COMPONENTS:
        given = {item.field: values[item.key] for item in settings_of(component) if item.key in values}
        parts[name] = component(**given)
    return Config(**parts)
