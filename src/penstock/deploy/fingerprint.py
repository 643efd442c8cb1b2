"""Fingerprints of a running model: short names of all that its numbers, and so its answers, depend on. The factory and the
disk tier make them at the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.deploy.device import is_on_gpu, kv_dtype

if TYPE_CHECKING:
    from penstock.engine.ports import Executor
    from penstock.models.weights import LoadedModel


def kv_fingerprint(config: Config, model: LoadedModel, executor: Executor) -> bytes:
    """32 bytes for all that the bytes of a KV block depend on. Raises OSError if the model's files can't be read."""
    from penstock.models.load import fingerprint

    parts = [*_numbers(config, model, executor), *_merged(config, has_times=True), executor.block_bytes]
    return blake2b(repr(parts).encode(), digest_size=32, key=fingerprint(model.path)).digest()


def system_fingerprint(config: Config, model: LoadedModel, executor: Executor, chat_template: str | None) -> str:
    """`fp_` and 16 hex digits for what an answer depends on beside its request and `max_model_len`: weights, chat template and
    what it is taken for, sampling defaults, end tokens, kernels, number types, version. The times of files are no part, so that
    servers of the same model on equal machines have the same.

    Raises OSError if the model's files can't be read.
    """
    from penstock.models.load import fingerprint

    parts = [*_numbers(config, model, executor), *_merged(config, has_times=False)]
    parts += [chat_template, model.sampling, model.eos_token_ids]
    parsers = (config.model.tool_call_parser, config.model.reasoning_parser)
    parts += [parsers] if parsers != ("auto", "auto") else []
    return f"fp_{blake2b(repr(parts).encode(), digest_size=8, key=fingerprint(model.path, has_times=False)).hexdigest()}"


def _merged(config: Config, *, has_times: bool) -> list[object]:
    """The content of the adapter that is merged into the weights; nothing without one."""
    from penstock.models.load import fingerprint

    path = config.lora.merge_lora
    return [] if path is None else [fingerprint(Path(path), has_times=has_times)]


def _numbers(config: Config, model: LoadedModel, executor: Executor) -> list[object]:
    """All that the numbers depend on beside the weights."""
    from penstock import __version__

    parts: list[object] = [__version__, config.backend.backend, getattr(executor, "variant", ""), *_kernels(config)]
    # Those of some models depend on the longest request.
    rotations = [attention.rotation for attention in model.spec.attentions]
    if model.spec.ending is not None:  # an encoder's, of which `--pooling` and `--weight-dtype` choose
        parts += [model.spec.ending, str(config.backend.weight_dtype)]
    return [*parts, str(kv_dtype(config)), config.kv.block_size, rotations, *_pairs_without_bias(model, executor)]


def _pairs_without_bias(model: LoadedModel, executor: Executor) -> Sequence[object]:
    """Pairs of columns of keys that are stored without their bias, which depends on the longest request; for each rotation."""
    from penstock.models.architectures import describe
    from penstock.models.program import KvWrite
    from penstock.models.rope import still_pairs

    num_positions = getattr(executor, "num_positions", executor.capacity.max_model_len)  # what a GPU's was made for
    rotations = {op.inv_freq for op in describe(model.spec).ops if isinstance(op, KvWrite) and op.bias is not None}
    return [still_pairs(inv_freq, num_positions) for inv_freq in sorted(rotations)]


def _kernels(config: Config) -> Sequence[object]:
    """Names of the code that computes: if one changes, the numbers may change."""
    if is_on_gpu(config):
        from penstock.backends import cuda

        gpu = cuda.find_gpu()
        backend = config.backend
        who = [cuda.flashinfer_version(), backend.attention, backend.deterministic, backend.weight_dtype]
        return [cuda.package_versions(), gpu if isinstance(gpu, str) else gpu.name, *who]
    from penstock.backends.native import _native

    return [blake2b(Path(_native.__file__).read_bytes(), digest_size=32).digest()]
