"""Fingerprints of a running model: hashes of everything that its KV cache or its answers depend on."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.deploy.blueprint import Compute
from penstock.types.adapter import MergedAdapter

if TYPE_CHECKING:
    from penstock.engine.ports import Executor
    from penstock.models.weights import LoadedModel


def kv_fingerprint(compute: Compute, model: LoadedModel, executor: Executor, merged: Sequence[MergedAdapter]) -> bytes:
    """Return a hash that changes with anything that the bytes of a KV block depend on, so that old files are not misread.

    `merged`: the adapters that are merged into the weights. Raises OSError if the model's files can't be read.
    """
    from penstock.models.architectures import describe
    from penstock.models.load import fingerprint

    parts = [*_numbers(compute, model, executor), *_merged(merged, has_times=True), executor.block_bytes]
    parts.append(describe(model.spec))  # other code of the same version may compute other keys
    return blake2b(repr(parts).encode(), digest_size=32, key=fingerprint(model.path)).digest()


def system_fingerprint(
    compute: Compute,
    model: LoadedModel,
    executor: Executor,
    chat_template: str | None,
    *,
    merged: Sequence[MergedAdapter],
    parsers: tuple[str, str],
) -> str:
    """Return `fp_` and 16 hex digits, for clients: a hash of everything that answers depend on, besides the request.

    Includes weights, chat template, `parsers` (of tools and reasoning), sampling defaults, end tokens, kernels, number types
    and version. Leaves out `max_model_len` and the files' times, so that equal servers agree. Raises OSError if the files can't
    be read.
    """
    from penstock.models.load import fingerprint

    parts = [*_numbers(compute, model, executor), *_merged(merged, has_times=False)]
    parts += [chat_template, model.sampling, model.eos_token_ids]
    parts += [parsers] if parsers != ("auto", "auto") else []
    return f"fp_{blake2b(repr(parts).encode(), digest_size=8, key=fingerprint(model.path, has_times=False)).hexdigest()}"


def _merged(adapters: Sequence[MergedAdapter], *, has_times: bool) -> list[object]:
    from penstock.models.load import fingerprint

    return [(fingerprint(Path(adapter.path), has_times=has_times), adapter.weight) for adapter in adapters]


def _numbers(compute: Compute, model: LoadedModel, executor: Executor) -> list[object]:
    """Return the facts, besides weights, that the results of a step depend on, such as version, kernels and KV type."""
    from penstock import __version__

    parts: list[object] = [__version__, compute.options.backend, getattr(executor, "variant", ""), *_kernels(compute)]
    # Some models' rotations depend on the longest request.
    rotations = [attention.rotation for attention in model.spec.attentions]
    if model.spec.ending is not None:  # an encoder, whose numbers depend on `--pooling` and `--weight-dtype`
        parts += [model.spec.ending, str(compute.options.weight_dtype)]
    return [*parts, str(compute.kv_dtype), compute.block_size, rotations, *_pairs_without_bias(model, executor)]


def _pairs_without_bias(model: LoadedModel, executor: Executor) -> Sequence[object]:
    """Return, for each rotary embedding, the column pairs of keys stored without bias. They depend on the longest request."""
    from penstock.models.architectures import describe
    from penstock.models.program import KvWrite
    from penstock.models.rope import still_pairs

    num_positions = getattr(executor, "num_positions", executor.capacity.max_model_len)  # a GPU keeps its first length
    rotations = {op.inv_freq for op in describe(model.spec).ops if isinstance(op, KvWrite) and op.bias is not None}
    return [still_pairs(inv_freq, num_positions) for inv_freq in sorted(rotations)]


def _kernels(compute: Compute) -> Sequence[object]:
    """Return facts that change with the compiled kernels: package versions and GPU, or the hash of the native library."""
    if compute.is_on_gpu:
        from penstock.backends import cuda

        gpu = cuda.find_gpu()
        backend = compute.options
        who = [cuda.flashinfer_version(), backend.attention, backend.deterministic, backend.weight_dtype]
        return [cuda.package_versions(), gpu if isinstance(gpu, str) else gpu.name, *who]
    from penstock.backends.native import _native

    return [blake2b(Path(_native.__file__).read_bytes(), digest_size=32).digest()]
