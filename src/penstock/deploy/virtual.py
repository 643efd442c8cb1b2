"""A virtual server of a config: the settings with which a simulation runs what `penstock serve` would start. The command line
asks; no weight is read, and no device is looked for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.config import Backend, Config, Device
from penstock.deploy import device
from penstock.deploy.encoders import require_answers
from penstock.deploy.policies import admission_limits, build_policies
from penstock.types.errors import ConfigError, ModelError
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.lab.cost_model import CostModel
    from penstock.lab.virtual_server import ServerSettings
    from penstock.models.weights import LoadedModel

DEFAULT_MAX_MODEL_LEN = 8192
"""Longest request without a model: that of the default one."""


def server_settings(config: Config, cost: CostModel, *, num_blocks: int | None = None) -> ServerSettings:
    """The policies, the door and the capacity that the config would give a server.

    `num_blocks`: KV blocks that requests can hold; then no model is needed. None: as many as the server would take on this
    machine, now, for the config's model, whose files must be here. Raises PenstockError.
    """
    from penstock.lab.virtual_server import ServerSettings

    config = _settled(config)
    capacity = _capacity(config, num_blocks)
    build_policies(config).gate.max_running(capacity)  # as the server does, before anything is run
    chosen, server = config.scheduler, config.server
    return ServerSettings(
        capacity=capacity,
        make_policies=partial(build_policies, config),
        cost=cost,
        limits=admission_limits(config.admission),
        enable_prefix_caching=config.kv.prefix_caching,
        isolates_tenants=config.kv.prefix_sharing == "tenant",
        slo_itl_ns=_ns(chosen.slo_itl_s),
        request_timeout_ns=_ns(server.request_timeout_s),
        queue_timeout_ns=_ns(server.queue_timeout_s),
        first_token_timeout_ns=_ns(server.first_token_timeout_s),
        depth=config.backend.steps_in_flight or (2 if device.is_on_gpu(config) else 1),
    )


def kv_bytes_per_token(config: Config) -> int:
    """Bytes of one position in a KV block of the config's model, with its share of the block's state. Raises ModelError."""
    size = config.kv.block_size
    return -(-_load(config).spec.block_bytes(device.kv_dtype(_settled(config)), size) // size)


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)


def _settled(config: Config) -> Config:
    """The config with its backend decided, whatever this machine has. Raises ConfigError for what is not simulated."""
    for flag, size_bytes in (
        ("--kv-disk-size", config.kv.kv_disk_size_bytes),
        ("--kv-host-size", config.kv.kv_host_size_bytes),
    ):
        if size_bytes:
            raise ConfigError("A tier below the KV cache is not simulated.", remedy=f"Leave out {flag}.")
    is_on_gpu = config.backend.device == Device.CUDA
    if config.backend.steps_in_flight is not None and not is_on_gpu:
        raise ConfigError("--steps-in-flight has no meaning on the CPU.", remedy="Set --device cuda, or leave it out.")
    chosen = (Device.CUDA, Backend.CUDA) if is_on_gpu else (Device.CPU, Backend.NATIVE)
    return replace(config, backend=replace(config.backend, device=chosen[0].value, backend=chosen[1].value))


def _capacity(config: Config, num_blocks: int | None) -> Capacity:
    rows, step_tokens, block_size = device.max_rows(config), device.max_step_tokens(config), config.kv.block_size
    if num_blocks is None:
        if device.is_on_gpu(config):
            raise ConfigError(
                "A GPU's KV cache is measured when a server starts on it.", remedy="Say how many blocks it has: --blocks."
            )
        return _capacity_here(config, _load(config))
    if config.kv.kv_cache_memory_bytes is not None:
        raise ConfigError("--blocks and --kv-cache-memory both say how large the KV cache is.", remedy="Leave one of them out.")
    if config.model.experts_on_disk:
        raise ConfigError(
            "--blocks says how large the KV cache is, wherever experts lie.", remedy="Leave out --experts-on-disk."
        )
    if num_blocks < 1:
        raise ConfigError(f"--blocks is {num_blocks}, and a KV cache has one at least.")
    longest = config.model.max_model_len or DEFAULT_MAX_MODEL_LEN
    return Capacity(1 + num_blocks, block_size, rows, step_tokens, min(longest, num_blocks * block_size))


def _load(config: Config) -> LoadedModel:
    from penstock.models.catalog import cache_dir, resolve
    from penstock.models.load import load_model

    try:
        model = load_model(resolve(config.model.model, cache_dir(config.model.cache_dir)))
    except ModelError as error:
        remedy = f"{error.remedy} Or simulate without its files: --blocks says how many KV blocks there are."
        raise ModelError(error.message, remedy=remedy.strip()) from error
    require_answers(model.name, model.spec, "a simulation")
    return model


def _capacity_here(config: Config, model: LoadedModel) -> Capacity:
    """On the CPU of this machine, with the memory that is free now."""
    from penstock.deploy.executor import plan_memory
    from penstock.deploy.experts import check_experts
    from penstock.machine import available_memory_bytes

    check_experts(config, model)
    plan, _ = plan_memory(config, model, available_memory_bytes())
    return plan.capacity
