"""Forecasts of a server, for `penstock show`, `plan` and `simulate`: the memory that a config would take, and its errors.

The checks and the memory plan are the same as when a server starts, but no weight is read and no kernel runs. The machine can
be another one. A server measures a GPU's steps; here they are assumed to take `ASSUMED_GPU_STEP_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.backends.native import footprint
from penstock.config import Config, Device
from penstock.config.keys import isolates_tenants
from penstock.config.units import nanoseconds
from penstock.deploy import resolve
from penstock.deploy.blueprint import Compute
from penstock.deploy.checks import check_block_size, check_model, is_of_product
from penstock.deploy.experts import check_disk, check_experts
from penstock.deploy.factory import find_source, plan_share
from penstock.deploy.policies import admission_limits, choose_policies
from penstock.deploy.resources import Resources
from penstock.deploy.sizing import KvPlan, Room, plan_gpu_kv
from penstock.machine import available_memory_bytes
from penstock.types.errors import ConfigError, ModelError, PenstockError
from penstock.types.model_spec import ModelSpec
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.lab.cost_model import CostModel
    from penstock.lab.simulation import Simulation
    from penstock.lab.sizing import ModelSize
    from penstock.models.catalog import ModelSource
    from penstock.models.facts import ModelFacts
    from penstock.models.formats import Floats, WeightFormat
    from penstock.models.hf_quantised import Quantisation
    from penstock.models.weights import LoadedModel
    from penstock.text.tokenizer import Tokenizer
    from penstock.types.kv_dtype import KvDtype
    from penstock.types.model_spec import Pooling
    from penstock.types.vocab import GgufVocab

ASSUMED_GPU_STEP_BYTES = 2 << 30
"""GPU memory for activations of the largest step, graphs, kernels and workspaces of libraries."""
ASSUMED_SYSTEM_BYTES = 1 << 30
"""Memory for the system and other processes on a machine from the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model's description, and the memory that its weights take in a backend."""

    name: str
    spec: ModelSpec
    num_weight_bytes: int
    num_disk_bytes: int
    """The part of the weights in a file: experts with --experts-on-disk."""
    num_read_bytes: int
    """Weights that a step reads. An embedding counts only if it is also the output matrix."""
    is_quantised: bool
    """Whether most bytes of the matrix products are weights of at most 8 bits."""
    assumed_formats: str = ""
    """If the weights are missing, the formats that their matrices are assumed to have, such as "bf16 and mxfp4"."""

    def size(self, kv_dtype: KvDtype, *, is_gpu: bool = False) -> ModelSize:
        from penstock.backends.cuda.supported import position_bytes
        from penstock.lab.sizing import size_of
        from penstock.models.architectures import describe
        from penstock.models.program import KvShape

        return size_of(
            describe(self.spec),
            name=self.name,
            kv_dtype=kv_dtype,
            num_weight_bytes=self.num_weight_bytes,
            num_read_bytes=self.num_read_bytes,
            is_quantised=self.is_quantised,
            kv_bytes_of=position_bytes if is_gpu else KvShape.num_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    compute: Compute
    kv: KvPlan


def forecast(config: Config, outline: Outline, *, is_gpu: bool, memory_bytes: int) -> Forecast:
    """Return the memory plan that a server would have on a machine with `memory_bytes` free, or on a GPU of that size.

    Raises the ConfigError or ModelError that the server would raise.
    """
    compute = resolve.decide(config, is_gpu=is_gpu)
    check_block_size(compute)
    if is_gpu:
        from penstock.backends.cuda.memory import Usage

        used_bytes = outline.num_weight_bytes + ASSUMED_GPU_STEP_BYTES
        kv = plan_gpu_kv(
            compute.wanted(outline.spec, config.model.max_model_len),
            config.kv,
            is_exact=config.model.max_model_len is not None,
            block_bytes=_block_bytes(compute, outline.spec),
            memory=Usage(total_bytes=memory_bytes, free_bytes=memory_bytes, used_bytes=used_bytes),
        )
    else:
        kv = resolve.plan_on_cpu(config, compute, outline.spec, _room(outline, memory_bytes))
    return Forecast(compute=compute, kv=kv)


def _room(outline: Outline, memory_bytes: int) -> Room:
    return Room(available_bytes=memory_bytes, num_weight_bytes=outline.num_weight_bytes - outline.num_disk_bytes)


def _block_bytes(compute: Compute, spec: ModelSpec) -> int:
    """Return the bytes of a KV block. Raises ModelError for a model that the GPU's backend does not compute."""
    if not compute.is_on_gpu:
        return footprint.block_bytes(spec, compute.kv_dtype, compute.block_size)
    from penstock.backends.cuda import supported
    from penstock.models.architectures import describe

    program = describe(spec)
    supported.check_program(program)
    return supported.block_bytes(program, compute.kv_dtype, compute.block_size)


# --- the model ---


def read_outline(config: Config, source: ModelSource, compute: Compute) -> Outline:
    """Read a model's outline from the headers of its files. Raises ModelError as `load_model`, and ConfigError as a server."""
    from penstock.models.catalog import SourceKind
    from penstock.models.load import load_model

    if source.kind is SourceKind.DIRECTORY and source.is_present and not any(source.path.glob("*.safetensors")):
        from penstock.models.hf import read_hf_quantisation, read_hf_spec

        if config.model.experts_on_disk:
            raise ConfigError(
                f"experts_on_disk is set, and there are no weights of {source.name}.",
                remedy="Leave out --experts-on-disk, or fetch them.",
            )
        spec = read_hf_spec(source.path, served_len=config.model.max_model_len)
        return assumed_outline(source.name, spec, read_hf_quantisation(source.path), compute.floats)
    model = load_model(source, floats=compute.floats, served_len=config.model.max_model_len)
    if config.model.experts_on_disk:
        check_experts(compute, model)
    check_model(compute, model)
    return _outline_of(config, compute, model)


def _outline_of(config: Config, compute: Compute, model: LoadedModel) -> Outline:
    held = model.held_bytes(compute.floats)
    read_bytes = sum(held.values()) - sum(held[name] for name in model.spec.looked_up)
    return Outline(
        name=model.name,
        spec=model.spec,
        num_weight_bytes=sum(held.values()) if compute.is_on_gpu else model.num_weight_bytes,
        num_disk_bytes=model.num_expert_bytes if config.model.experts_on_disk else 0,
        num_read_bytes=read_bytes,
        is_quantised=_is_quantised(
            (tensor.format, tensor.num_bytes) for name, tensor in model.weights.items() if is_of_product(name, tensor.num_rows)
        ),
    )


def _is_quantised(matrices: Iterable[tuple[WeightFormat, int]]) -> bool:
    from penstock.models.formats import BLOCKS

    sizes = [(fmt in BLOCKS, num_bytes) for fmt, num_bytes in matrices]
    return 2 * sum(num_bytes for is_of_blocks, num_bytes in sizes if is_of_blocks) > sum(num_bytes for _, num_bytes in sizes)


def assumed_outline(name: str, spec: ModelSpec, quantisation: Quantisation, floats: Floats) -> Outline:
    """Return the outline of a model whose weights are missing."""
    from penstock.models.architectures import describe
    from penstock.models.checks import weight_shapes
    from penstock.models.weights import held_weight_bytes

    shapes = weight_shapes(describe(spec))
    formats = {weight: quantisation.likely_format(weight, *shape) for weight, shape in shapes.items()}
    sizes = {weight: held_weight_bytes(weight, formats[weight], shape, floats) for weight, shape in shapes.items()}
    matrices = [weight for weight, (num_rows, _) in shapes.items() if num_rows > 1]
    num_bytes = sum(sizes.values())
    embeddings = sum(sizes[name] for name in spec.looked_up)
    return Outline(
        name=name,
        spec=spec,
        num_weight_bytes=num_bytes,
        num_disk_bytes=0,
        num_read_bytes=num_bytes - embeddings,
        is_quantised=_is_quantised((formats[one], sizes[one]) for one in matrices if is_of_product(one, shapes[one][0])),
        assumed_formats=" and ".join(sorted({formats[weight] for weight in matrices})),
    )


def require_answers(name: str, spec: ModelSpec, what: str) -> None:
    """Raise ConfigError for a model that only embeds or scores texts. `what`: the command, for the message."""
    if spec.ending is not None:
        raise ConfigError(
            f"{name} reads texts and writes none, and {what} knows only models that write.",
            remedy="Name a model that writes text, or measure a server of this one (penstock bench --endpoint embeddings).",
        )


# --- the appraisal of `penstock show` ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reason why a server would not start: the check that failed, its cause and the remedy."""

    check: str
    """The checked part: weights, tokenizer, chat template, sampling, backend, disk or memory."""
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    """A model's facts, the reasons why a server could not start, and the memory that it would take."""

    facts: ModelFacts
    refusals: tuple[Refusal, ...]
    """Empty if a server can be started."""
    model: LoadedModel | None
    """None if the weights are refused. `outline` and `forecast` are None then, too."""
    outline: Outline | None
    forecast: Forecast | None
    """The memory plan on this machine's CPU. None if planning fails, or for an encoder, which has no KV cache."""
    num_free_bytes: int
    num_draft_bytes: int
    """Memory for the small model of --speculation-model."""
    longest_text: int | None
    """Most tokens of an encoder's text. None if planning fails, or for a model that writes text."""


def appraise(config: Config, source: ModelSource) -> Appraisal:
    """Check whether a server could start with this model on this machine's CPU. Raises ModelError if no file can be read.

    All checks run, even after one has failed.
    """
    from penstock.backends.native.lowering import check_program
    from penstock.models.architectures import describe
    from penstock.models.facts import read_facts
    from penstock.models.generation import with_sampling_defaults
    from penstock.models.load import load_model

    facts, refusals = read_facts(source), list[Refusal]()
    model, outline, expected, longest_text, num_draft_bytes = None, None, None, None, 0
    with _refusing("weights", refusals):
        settings = config.model
        pooling = cast("Pooling | None", settings.pooling)
        model = load_model(source, served_len=settings.max_model_len, task=settings.task, pooling=pooling)
        if config.lora.merge_lora:
            from penstock.models.merging import with_adapters

            model = with_adapters(model, config.lora.merged)
    _check_text(config, source, facts, model, refusals)
    free_bytes = available_memory_bytes()
    if model is not None:
        compute = resolve.decide(config, is_gpu=False)
        with _refusing("sampling", refusals):
            model = with_sampling_defaults(model, config.model.generation_config)
        with _refusing("backend", refusals):
            check_model(compute, model)
            check_program(describe(model.spec))
        outline = _outline_of(config, compute, model)
        with _refusing("disk", refusals):
            if config.model.experts_on_disk:
                check_experts(compute, model)
                check_disk(resolve.expert_folder(config), model)
        with _refusing("memory", refusals):
            if model.encoder is None:
                expected = forecast(config, outline, is_gpu=False, memory_bytes=free_bytes)
            else:
                _, plan = resolve.plan_texts(config, compute, model, _room(outline, free_bytes))
                longest_text = plan.capacity.max_model_len
        if expected is not None and config.scheduler.speculation_model is not None:
            with _refusing("draft model", refusals):
                num_draft_bytes = plan_share(config, source, Resources(), free_bytes).num_draft_bytes
    return Appraisal(
        facts=facts,
        refusals=tuple(refusals),
        model=model,
        outline=outline,
        forecast=expected,
        num_free_bytes=free_bytes,
        num_draft_bytes=num_draft_bytes,
        longest_text=longest_text,
    )


@contextmanager
def _refusing(check: str, refusals: list[Refusal]) -> Iterator[None]:
    """Run the block as one check. Append an error that ends it to `refusals`."""
    try:
        yield
    except PenstockError as error:
        refusals.append(Refusal(check=check, cause=error.message, remedy=error.remedy))


def _check_text(
    config: Config, source: ModelSource, facts: ModelFacts, model: LoadedModel | None, refusals: list[Refusal]
) -> None:
    """Check the tokenizer and the chat template, also if the weights are refused."""
    from penstock.text.chat import ChatTemplate, choose_chat_template
    from penstock.text.tokenizer import load_tokenizer

    tokenizer: Tokenizer | None = None
    with _refusing("tokenizer", refusals):
        if model is None:
            tokenizer = load_tokenizer(tokenizer_source(source))
        else:
            tokenizer = load_tokenizer(model.tokenizer_source, special_tokens=model.special_tokens)
    with _refusing("chat template", refusals):
        template = choose_chat_template(config.model.chat_template, facts.chat_templates)
        if template is not None:
            ChatTemplate(template, special_tokens={} if tokenizer is None else tokenizer.special_tokens)


def tokenizer_source(source: ModelSource) -> Path | GgufVocab:
    """Return what `load_tokenizer` reads of a model whose weights may be missing. Raises ModelError."""
    from penstock.models.catalog import SourceKind
    from penstock.models.gguf import read_vocab
    from penstock.models.gguf_file import open_gguf
    from penstock.models.hf_config import find_tokenizer

    if source.kind is SourceKind.DIRECTORY:
        return find_tokenizer(source.path)
    file = open_gguf(source.path)
    return read_vocab(file, len(file.get_list("tokenizer.ggml.tokens", str)))


# --- the virtual server of `penstock simulate` ---


def refuse_own_guesser(config: Config) -> None:
    """Raise ConfigError if the guesser is a user's class: a simulation guesses by its `acceptance` and never calls it."""
    from penstock.sched.policies.own import is_own

    guesser = config.scheduler.speculation
    if guesser is not None and is_own(guesser):
        raise ConfigError(
            f"The guesser {guesser!r} is not simulated: simulated tokens have no values to guess from.",
            remedy="Measure it on a server with `penstock bench`, and give --speculation off here.",
        )


def refuse_unsimulated(config: Config) -> None:
    """Raise ConfigError if the config has parts that a simulation lacks."""
    for flag, value, name in (
        ("--kv-disk-size", config.kv.kv_disk_size_bytes, "A tier below the KV cache is"),
        ("--kv-host-size", config.kv.kv_host_size_bytes, "A tier below the KV cache is"),
        ("--speculation-model", config.scheduler.speculation_model, "Guesses of a small model are"),
    ):
        if value:
            raise ConfigError(f"{name} not simulated.", remedy=f"Leave out {flag}.")


def simulation_of(config: Config, cost: CostModel, *, num_blocks: int | None = None) -> Simulation:
    """Return a simulated server with the policies, admission limits, capacity and timeouts of this config.

    `num_blocks`: KV blocks for requests. None: as many as a server would take on this machine now, which needs the model's
    files. Raises PenstockError.
    """
    refuse_unsimulated(config)
    compute = resolve.decide(config, is_gpu=config.backend.device == Device.CUDA)
    return simulated(config, compute, _capacity(config, compute, cost, num_blocks), cost)


def simulated(config: Config, compute: Compute, capacity: Capacity, cost: CostModel) -> Simulation:
    """Return a simulated server with this capacity. Raises ConfigError for policies that a server would refuse."""
    from penstock.lab.simulation import Simulation

    policies = choose_policies(config)
    policies.check(capacity.max_rows, capacity.max_step_tokens)
    return Simulation(
        capacity=capacity,
        make_policies=policies.make,
        cost=cost,
        limits=admission_limits(config.admission),
        enable_prefix_caching=config.kv.prefix_caching,
        isolates_tenants=isolates_tenants(config.server, config.kv.prefix_sharing),
        slo_itl_ns=nanoseconds(config.scheduler.slo_itl_s),
        request_timeout_ns=nanoseconds(config.server.request_timeout_s),
        queue_timeout_ns=nanoseconds(config.server.queue_timeout_s),
        first_token_timeout_ns=nanoseconds(config.server.first_token_timeout_s),
        depth=compute.depth,
    )


def simulation_among(
    name: str, configs: Sequence[Config], costs: Mapping[str, CostModel], *, num_blocks: int | None = None
) -> tuple[Simulation, float]:
    """Return the simulation of the model with this name, and its share of the machine. Raises ConfigError."""
    for config in configs:
        if name in (config.model.model, *config.model.served_model_names, *config.sharing.aliases):
            break
    else:
        raise ConfigError(f"{name} is not served.", remedy="Add a [[models]] table for it.")
    if config.backend.device == Device.CUDA:
        raise ConfigError(f"{name} is on a GPU, and models take turns on the CPU alone.", remedy="Simulate it by itself.")
    return simulation_of(config, costs[name], num_blocks=num_blocks), config.sharing.machine_share


def kv_bytes_per_token(config: Config) -> int:
    """Return the bytes of one token in the model's KV cache, including a token's part of the recurrent state in its block."""
    compute = resolve.decide(config, is_gpu=config.backend.device == Device.CUDA)
    size = compute.block_size
    return -(-_block_bytes(compute, _load(config).spec) // size)


def _capacity(config: Config, compute: Compute, cost: CostModel, num_blocks: int | None) -> Capacity:
    from penstock.lab.cost_model import CostModel

    if num_blocks is None:
        if compute.is_on_gpu:
            raise ConfigError(
                "A GPU's KV cache is measured when a server starts on it.", remedy="Say how many blocks it has: --blocks."
            )
        model = _load(config)
        if config.model.experts_on_disk:
            check_experts(compute, model)
        outline = _outline_of(config, compute, model)
        return forecast(config, outline, is_gpu=False, memory_bytes=available_memory_bytes()).kv.capacity
    if config.kv.kv_cache_memory_bytes is not None:
        raise ConfigError("--blocks and --kv-cache-memory both say how large the KV cache is.", remedy="Leave one of them out.")
    if config.model.experts_on_disk:
        raise ConfigError(
            "--blocks says how large the KV cache is, wherever experts lie.", remedy="Leave out --experts-on-disk."
        )
    if num_blocks < 1:
        raise ConfigError(f"--blocks is {num_blocks}, and a KV cache has one at least.")
    longest = num_blocks * compute.block_size
    # The default costs are those of the default model, which takes 8,192 tokens.
    if asked := config.model.max_model_len or (8192 if cost == CostModel() else None):
        longest = min(asked, longest)
    return Capacity(1 + num_blocks, compute.block_size, compute.max_rows, compute.max_step_tokens, longest)


def _load(config: Config) -> LoadedModel:
    from penstock.models.load import load_model

    try:
        model = load_model(find_source(config), served_len=config.model.max_model_len)
    except ModelError as error:
        remedy = f"{error.remedy} Or leave out the model, and set --blocks, and with a link --kv-bytes-per-token."
        raise ModelError(error.message, remedy=remedy.strip()) from error
    require_answers(model.name, model.spec, "a simulation")
    return model
