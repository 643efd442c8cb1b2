"""Files of a model, or of an adapter, that are present: load them in any format, and tell them from another's."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from penstock.models.adapter import AdapterFactors
from penstock.models.adapter_files import AdapterFiles
from penstock.models.catalog import ModelSource, SourceKind, split_files
from penstock.models.formats import Floats
from penstock.models.generation import obeying
from penstock.models.program import Program
from penstock.models.weights import LoadedModel
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec, Pooling
from penstock.types.vocab import GgufVocab


def load_model(
    source: ModelSource,
    *,
    max_weight_bytes: int | None = None,
    floats: Floats = Floats.BF16,
    check_vocab: Callable[[GgufVocab], None] | None = None,
    generation: str = "none",
    served_len: int | None = None,
    experts_on_disk: bool = False,
    task: str = "auto",
    pooling: Pooling | None = None,
) -> LoadedModel:
    """The model of a source that is present, called `source.name`, for texts of up to `served_len` tokens (None: the model's).

    Raises ModelError if its files are missing, corrupt or unsupported, or if its weights would take more than
    `max_weight_bytes` of memory, in a backend that holds `floats` (checked before any weight is read). So is a GGUF file's
    vocabulary, by `check_vocab`: this layer knows no tokenizers. `generation` is the setting `generation_config`.
    With `experts_on_disk`, the weights of a mixture's experts take no memory. `task` and `pooling` are those of
    `endings.choose_ending`.
    """
    if not source.is_present:
        remedy = f"Fetch it with `penstock pull {source.name}`." if source.entry or source.hub else "Check the path."
        raise ModelError(f"The files of {source.name} are not at {source.path}.", remedy=remedy)
    if source.kind is SourceKind.DIRECTORY:
        from penstock.models.hf import load_hf_directory

        model = load_hf_directory(
            source.path,
            name=source.name,
            max_weight_bytes=max_weight_bytes,
            floats=floats,
            served_len=served_len,
            experts_on_disk=experts_on_disk,
            task=task,
            pooling=pooling,
        )
    else:
        from penstock.models.gguf import load_gguf

        model = load_gguf(
            source.path,
            name=source.name,
            max_weight_bytes=max_weight_bytes,
            floats=floats,
            check_vocab=check_vocab,
            served_len=served_len,
            experts_on_disk=experts_on_disk,
            task=task,
            pooling=pooling,
        )
    return obeying(model, generation)


def load_adapter(
    path: Path, spec: ModelSpec, program: Program, *, max_rank: int, files: AdapterFiles | None = None
) -> AdapterFactors:
    """The factors of the adapter in a folder of PEFT or in a GGUF file, for a model of this spec and program.

    `files` bounds the reading. Raises ModelError for whatever is wrong with its files, or is not computed.
    """
    if path.suffix == ".gguf":
        from penstock.models.gguf_adapter import read_gguf_adapter

        return read_gguf_adapter(path, spec, program, max_rank=max_rank, files=files)
    from penstock.models.peft import read_peft

    return read_peft(path, spec, program, max_rank=max_rank, files=files)


NUM_SAMPLES = 16
SAMPLE_BYTES = 1 << 16


def fingerprint(path: Path, *, has_times: bool = True) -> bytes:
    """32 bytes of a file, of all files of a split one, or of those directly in a folder. Raises OSError if they can't be read.

    `has_times`: with the times of their last change, which tell a change that no sample hits, and differ between copies.
    """
    digest = blake2b(digest_size=32)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
    else:
        files = [path, *(file for file in split_files(path)[1:] if file.is_file())]
    for file in files:
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns if has_times else ''}\0".encode())
        with file.open("rb") as data:
            for idx in range(NUM_SAMPLES):
                data.seek(status.st_size * idx // NUM_SAMPLES)
                digest.update(data.read(SAMPLE_BYTES))
    return digest.digest()
