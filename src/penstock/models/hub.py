"""Fetches models and adapters from the Hugging Face hub, so that all files of one are of the same revision."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from penstock.models.cache import fetching_alone
from penstock.models.catalog import COMPLETE_MARKER, HubRef, ModelSource, split_files, unfinished_marker
from penstock.models.progress import Progress, copy
from penstock.types.errors import DISK_ERRORS, DownloadError, ModelError

FILES = (
    *("config.json", "generation_config.json", "quantize_config.json", "adapter_config.json", "adapter_model.safetensors"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer.model", "tekken.json", "added_tokens.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "artifact.metadata"),
    *("[1-9]_*/config.json", "[1-9]_*/model.safetensors"),
)
"""Files that the loader reads. Repositories often have the same weights in other formats."""


def fetch_from_hub(source: ModelSource, ref: HubRef, progress: Progress) -> None:
    """Fetch the newest revision of a model, or update it to that. Raises ModelError, DownloadError and OSError."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise DownloadError(
            "Models of the Hugging Face hub need the package huggingface_hub.",
            remedy="Install it in Penstock's source folder: `pip install '.[hf]'`.",
        ) from error
    path = source.path
    try:
        if ref.file is None:
            _fetch_folder(_Repository(huggingface_hub, ref.repo, path, progress))
        else:
            root = path.parents[len(ref.file.split("/")) - 1]
            _fetch_gguf(_Repository(huggingface_hub, ref.repo, root, progress), path)
    except Exception as error:  # the library raises errors of its own, of its HTTP client and of the system
        if isinstance(error, ModelError | DownloadError) or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
            raise  # not the hub's fault
        told = error.__cause__ or error if isinstance(error, ValueError) else error  # "Force download failed due to the above"
        cause = (str(told).strip() or type(told).__name__).splitlines()[0].removeprefix("Got: ").rstrip(" .:")
        kept = f" {path} stays as it is." if source.is_present else ""
        raise DownloadError(
            f"{ref.repo} could not be fetched from the Hugging Face hub: {cause}.{kept}",
            remedy="Check the name and the network; for a gated model set HF_TOKEN.",
        ) from error


class _Repository:
    """A repository at its newest revision, and the folder on disk that gets its files."""

    def __init__(self, hub: Any, name: str, folder: Path, progress: Progress) -> None:
        # The library's other functions return what is on disk if the hub does not answer, or refuses; this one raises.
        info = hub.model_info(name, files_metadata=True)
        self.name = name
        self.folder = folder
        self.revision: str | None = info.sha
        self.files = {file.rfilename: file for file in info.siblings or ()}
        self._records = folder / ".cache/huggingface/download"  # the library has a file there for each that it fetched
        self._hub = hub
        self._progress = progress
        self._times_before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}

    def is_here(self, name: str) -> bool:
        """Return whether a file of the repository is on disk, by its size."""
        file = self.folder / name
        return name in self.files and file.is_file() and file.stat().st_size == self.files[name].size

    @contextmanager
    def fetching_alone(self) -> Iterator[None]:
        """Keep other processes from fetching files of the repository, and delete what killed ones left of theirs."""
        with fetching_alone(self.folder, self._progress.note):
            # HASH.ETAG.RANDOM.incomplete. Older versions of the library write HASH.ETAG.incomplete, and resume it.
            for part in sorted(self._records.rglob("*.*.*.incomplete")):
                part.unlink()
            yield

    def check_access(self, name: str) -> None:
        """Raise if the repository is gated. `name`: any of its files."""
        self._hub.get_hf_file_metadata(self._hub.hf_hub_url(self.name, name, revision=self.revision))

    def fetch(self, name: str, **options: Any) -> None:
        self._hub.hf_hub_download(self.name, name, local_dir=self.folder, revision=self.revision, **options)

    def fetch_all(self, patterns: Sequence[str]) -> None:
        self._hub.snapshot_download(self.name, local_dir=self.folder, revision=self.revision, allow_patterns=list(patterns))

    def delete_gone(self) -> None:
        """Delete fetched files that the repository no longer has. GGUF files stay: they are other models."""
        for record in sorted(self._records.rglob("*.metadata")):
            name = record.relative_to(self._records).as_posix().removesuffix(".metadata")
            if name not in self.files and not name.endswith(".gguf"):
                (self.folder / name).unlink(missing_ok=True)
                record.unlink()

    def renew(self, names: Iterable[str]) -> None:
        """Fetch files again that the library did not touch, and that differ from the hub's."""
        left = [name for name in names if self._was_left(name)]
        for name in self.outdated(left):
            self.fetch(name, force_download=True)

    def _was_left(self, name: str) -> bool:
        if name not in self.files or not self.files[name].size:  # mirrors of the hub may not list sizes and digests
            return False
        path = self.folder / name
        return path in self._times_before and path.stat().st_mtime_ns == self._times_before[path]

    def outdated(self, names: Sequence[str]) -> Iterator[str]:
        """Return which files on disk have another digest than the hub's, because a refused download left them."""
        listed = [self.files[name] for name in names]
        if listed:
            self._progress.begin("Comparing the files that were here with the hub's", sum(file.size for file in listed))
        done = 0
        for file in listed:
            git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
            digest, known = (hashlib.sha256(), file.lfs.sha256) if file.lfs else (git, file.blob_id)
            with (self.folder / file.rfilename).open("rb") as stream:
                done = copy(stream, None, digest, self._progress, done)
            if digest.hexdigest() != known:
                yield file.rfilename


def _fetch_folder(repository: _Repository) -> None:
    """Bring a model or adapter in safetensors up to date. Its marker file names the revision, once all files are there."""
    files = repository.files
    is_adapter = "adapter_config.json" in files
    has_weights = not files.keys().isdisjoint(("model.safetensors", "model.safetensors.index.json"))
    if not is_adapter and not ("config.json" in files and has_weights):
        raise DownloadError(
            f"{repository.name} on the Hugging Face hub has no config.json with model.safetensors.",
            remedy=f"Use a repository that has it; for a GGUF file write hf:{repository.name}:NAME.gguf.",
        )
    wanted = sorted(name for name in files if any(fnmatch(name, pattern) for pattern in FILES))
    if not _is_current(repository, wanted):
        with repository.fetching_alone():
            if not _is_current(repository, wanted):  # another process may have fetched it meanwhile
                _update_folder(repository, wanted, is_adapter=is_adapter)


def _is_current(repository: _Repository, wanted: Sequence[str]) -> bool:
    marker = repository.folder / COMPLETE_MARKER
    is_same = marker.is_file() and marker.read_text() == repository.revision
    return is_same and all(map(repository.is_here, wanted)) and all(map(repository.is_here, _shards(repository.folder)))


def _update_folder(repository: _Repository, wanted: Sequence[str], *, is_adapter: bool) -> None:
    folder = repository.folder
    marker = folder / COMPLETE_MARKER
    repository.check_access("adapter_config.json" if is_adapter else "config.json")
    marker.unlink(missing_ok=True)
    repository.delete_gone()
    if not is_adapter:
        _check_tokenizer(repository)
    repository.fetch_all(FILES)
    shards = _shards(folder)
    for name in shards:
        if name not in wanted:
            repository.fetch(name)
    repository.renew(dict.fromkeys([*wanted, *shards]))
    for name in [*wanted, *_shards(folder)]:  # the index may have been renewed
        if not (folder / name).is_file():
            cause = f"{name} of {repository.name} could not be fetched from the Hugging Face hub."
            raise DownloadError(cause, remedy="Check the network,")
    marker.write_text(repository.revision or "")


def _shards(folder: Path) -> Sequence[str]:
    """Return the files that the index of the weights names. They can have any name."""
    from penstock.models.hf_config import read_weight_map  # not at the top, for fast imports

    return list(dict.fromkeys((read_weight_map(folder) or {}).values()))


def _check_tokenizer(repository: _Repository) -> None:
    """Raise DownloadError if the model has no tokenizer. A draft head needs none."""
    from penstock.models.hf_config import TOKENIZERS, is_draft_head

    folder = repository.folder
    if any(name in repository.files or (folder / name).is_file() for name in TOKENIZERS):  # or the user's own
        return
    repository.fetch("config.json")
    if not is_draft_head(folder):
        raise DownloadError(
            f"{repository.name} on the Hugging Face hub has no {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}.",
            remedy=f"Use a GGUF file of the model or a repository that has one of them, or put one into {folder}.",
        )


def _fetch_gguf(repository: _Repository, path: Path) -> None:
    """Fetch a GGUF model, which can have several files. While they may be of two revisions, a marker is beside them."""
    names = [file.relative_to(repository.folder).as_posix() for file in split_files(path)]
    marker = unfinished_marker(path)
    if all(map(repository.is_here, names)) and not any(repository.outdated(names)):
        if marker.exists():
            marker.unlink()
        return  # without the marker: other processes can use the model during the comparison
    with repository.fetching_alone():
        if len(names) > 1:
            repository.check_access(names[0])
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        for name in names:
            repository.fetch(name)
        repository.renew(names)
        marker.unlink(missing_ok=True)
