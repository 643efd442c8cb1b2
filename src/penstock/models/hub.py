"""Fetches models of the Hugging Face hub. Called by `models.pull`; alone in importing the extra `penstock[hf]`, and lazily."""

from __future__ import annotations

from penstock.models.catalog import COMPLETE_MARKER, HubRef, ModelSource
from penstock.types.errors import DownloadError

_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "adapter_config.json",
)
"""What the loader reads; repositories often hold the same weights again in other formats."""


def fetch_hub(source: ModelSource) -> None:
    """Download a hub source to `source.path`; the library resumes, verifies and locks. Raises DownloadError."""
    if source.hub is None:
        raise ValueError(f"{source.name} is no source of the hub")
    try:
        import huggingface_hub
    except ImportError as error:
        raise DownloadError(
            "Models of the Hugging Face hub need the package huggingface_hub.",
            remedy="Install it in Penstock's source folder: `pip install '.[hf]'`.",
        ) from error
    root = source.path.parents[len(source.hub.file.split("/")) - 1] if source.hub.file else source.path
    try:
        if source.hub.file:
            huggingface_hub.hf_hub_download(source.hub.repo, source.hub.file, local_dir=root)
        else:
            huggingface_hub.snapshot_download(source.hub.repo, local_dir=root, allow_patterns=list(_FILES))
    except Exception as error:  # the library raises errors of its own, of its HTTP client and of the system
        raise _failure(source.hub, error) from error
    if source.hub.file is None:
        (root / COMPLETE_MARKER).touch()


def _failure(ref: HubRef, error: Exception) -> DownloadError:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    cause = first_line.removeprefix("Got: ").rstrip(" .:")
    return DownloadError(
        f"{ref.repo} could not be fetched from the Hugging Face hub: {cause}.",
        remedy="Check the name and the network; for a gated model set HF_TOKEN.",
    )
