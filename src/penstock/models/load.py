"""Loads the files of a model or of an adapter, whatever their format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TypedDict, Unpack

from penstock.models.adapter import AdapterFactors
from penstock.models.adapter_files import AdapterFiles
from penstock.models.catalog import ModelSource, SourceKind, split_files
from penstock.models.formats import Floats
from penstock.models.generation import with_sampling_defaults
from penstock.models.program import Program
from penstock.models.weights import Generation, LoadedModel, WeightTensor
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec, Pooling
from penstock.types.vocab import GgufVocab


class LoadOptions(TypedDict, total=False):
    max_weight_bytes: int | None  # None: unlimited
    floats: Floats
    served_len: int | None  # tokens of the longest text; None: all positions
    experts_on_disk: bool  # the experts' weights take no memory
    task: str
    pooling: Pooling | None  # `task` and `pooling` as in `endings.choose_ending`


def load_model(
    source: ModelSource,
    *,
    check_vocab: Callable[[GgufVocab], None] | None = None,
    generation: str = "none",
    **options: Unpack[LoadOptions],
) -> LoadedModel:
    """Load a model with files on disk. `generation` is the setting `--generation-config`.

    `check_vocab` raises ModelError for a vocabulary that the caller can't use. Raises ModelError before any weight is read.
    """
    if not source.is_present:
        remedy = f"Fetch it with `penstock pull {source.name}`." if source.entry or source.hub else "Check the path."
        raise ModelError(f"The files of {source.name} are not at {source.path}.", remedy=remedy)
    if source.kind is SourceKind.DIRECTORY:
        from penstock.models.hf import load_hf_directory

        model = load_hf_directory(source.path, name=source.name, **options)
    else:
        from penstock.models.gguf import load_gguf

        model = load_gguf(source.path, name=source.name, check_vocab=check_vocab, **options)
    if model.generation is None and source.entry is not None and source.entry.sampling:
        model = replace(model, generation=Generation("the model's authors", source.entry.sampling))
    return with_sampling_defaults(model, generation)


def load_adapter(
    path: Path,
    spec: ModelSpec,
    program: Program,
    *,
    tables: Mapping[str, WeightTensor],
    max_rank: int,
    files: AdapterFiles | None = None,
    is_merged: bool = False,
) -> AdapterFactors:
    """Return the factors of a LoRA adapter, a PEFT folder or a GGUF file. Raises ModelError.

    `tables` has the model's embedding, and its output unless tied: copies in the adapter are compared with them. `files` limits
    the reading. `is_merged`: the factors are for `merging`, which supports more kinds of adapters.
    """
    from penstock.models.peft import read_gguf_adapter, read_peft

    files = files or AdapterFiles()
    if path.suffix == ".gguf":
        return read_gguf_adapter(path, spec, program, max_rank, files, is_merged=is_merged)
    return read_peft(path, spec, program, max_rank, files, tables=tables, is_merged=is_merged)


def fingerprint(path: Path, *, has_times: bool = True, has_others: bool = True) -> bytes:
    """Return 32 bytes that identify a model's file, all files of a split one, or the files of a folder. Raises OSError.

    A folder's files include those of its modules, such as `2_Dense`. The bytes depend on names, sizes, samples of the content
    and, with `has_times`, on the times of the last change. Without `has_others`, a folder's README, its marker of a download
    and a GGUF model that lies there do not count: only its safetensors and JSON files.
    """
    digest = blake2b(digest_size=32)
    if path.is_dir():
        folder, files = path, sorted(file for file in [*path.iterdir(), *path.glob("[1-9]_*/*")] if file.is_file())
        files = [file for file in files if has_others or file.suffix in (".safetensors", ".json")]
    else:
        folder, files = path.parent, [path, *(file for file in split_files(path)[1:] if file.is_file())]
    for file in files:
        status = file.stat()
        name = file.relative_to(folder).as_posix()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns if has_times else ''}\0".encode())
        with file.open("rb") as data:
            for idx in range(16):
                data.seek(status.st_size * idx // 16)
                digest.update(data.read(1 << 16))
    return digest.digest()
