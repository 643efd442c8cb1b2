"""The blueprint of a running model: frozen values for all of its settings, names and sizes.

`resolve` makes a blueprint from a config and the headers of the model's files. `build` makes a running model from the
blueprint, and replaces a failed engine with the same blueprint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.config import Backend, BackendConfig, KvConfig, LoraConfig, ModelConfig
from penstock.deploy.sizing import AdapterRoom, KvPlan, wanted_len
from penstock.types.adapter import MergedAdapter
from penstock.types.errors import ModelChanged
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.deploy.kv_events import KvEvents
    from penstock.deploy.packed import PackedWeights
    from penstock.deploy.policies import PolicyRecipe
    from penstock.deploy.resources import MemoryShare
    from penstock.machine import Cores
    from penstock.models.catalog import ModelSource
    from penstock.models.formats import Floats
    from penstock.models.weights import LoadedModel
    from penstock.types.model_spec import ModelSpec, Pooling
    from penstock.types.vocab import GgufVocab


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The chosen backend, and the settings with defaults that depend on it, such as the number of rows in a step."""

    options: BackendConfig
    """The settings, with device and backend decided."""
    kv_dtype: KvDtype
    block_size: int
    max_rows: int
    """Requests in one step at most."""
    max_step_tokens: int
    step_timeout_s: float | None
    """A step that takes longer counts as stuck. None: no limit."""

    @property
    def is_on_gpu(self) -> bool:
        return self.options.backend == Backend.CUDA

    @property
    def is_native(self) -> bool:
        return self.options.backend == Backend.NATIVE

    def wanted(self, spec: ModelSpec, max_model_len: int | None, window: int = 0) -> Capacity:
        """Return the capacity that the settings ask for, with 0 KV blocks: the cache is sized later. Raises ConfigError."""
        longest = wanted_len(spec, max_model_len)
        return Capacity(0, self.block_size, self.max_rows, self.max_step_tokens, longest, window=window)

    @property
    def depth(self) -> int:
        """Most steps in flight at once."""
        return self.options.steps_in_flight or (2 if self.is_on_gpu else 1)

    @property
    def floats(self) -> Floats:
        """The type in which the backend holds matrices of floats. The size of the weights depends on it."""
        from penstock.models.formats import Floats  # with NumPy

        if not self.is_on_gpu:
            return Floats.BF16
        return Floats.FP8 if self.options.weight_dtype == "fp8" else Floats.AS_STORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The arguments for loading a model's files: at the start, and again after a failure."""

    source: ModelSource
    settings: ModelConfig
    floats: Floats
    merged: tuple[MergedAdapter, ...]
    files: Mapping[Path, bytes]
    """`fingerprints` of what `load` reads, from before the first load."""
    head: Path | None = None
    """Folder of a draft head for the model."""
    is_of_head: bool = False
    """Load the head in place of the model."""

    def load(self, *, max_weight_bytes: int | None = None) -> LoadedModel:
        """Read the headers of the files. Raises ModelError, also if the weights take more than `max_weight_bytes`."""
        from penstock.models.load import load_model

        model = load_model(
            self.source,
            max_weight_bytes=max_weight_bytes,
            floats=self.floats,
            check_vocab=_check_vocab,
            served_len=self.settings.max_model_len,
            generation=self.settings.generation_config,
            experts_on_disk=self.settings.experts_on_disk,
            task=self.settings.task,
            pooling=cast("Pooling | None", self.settings.pooling),
        )
        if self.merged:
            from penstock.models.merging import with_adapters

            model = with_adapters(model, self.merged)
        if self.head is None:
            return model
        from penstock.models.eagle import load_head

        head = load_head(self.head, model)
        return head.model if self.is_of_head else head.attached(model)

    def check_unchanged(self) -> None:
        """Raise ModelChanged if the files are not the first load's, and OSError if that can't be found out."""
        from penstock.models.load import fingerprint

        for path, known in self.files.items():
            if fingerprint(path, has_others=False) != known:
                remedy = "Load the model again, or restart the server."
                raise ModelChanged(f"{path} has changed since the model was loaded.", remedy=remedy)


def fingerprints(*paths: Path) -> dict[Path, bytes]:
    """Return the fingerprint of each file or folder, or nothing if one can't be read: its load says so better."""
    from penstock.models.load import fingerprint

    try:
        return {path: fingerprint(path, has_others=False) for path in paths}
    except OSError:
        return {}


def _check_vocab(vocab: GgufVocab) -> None:
    """Raise ModelError for a vocabulary without a tokenizer, before weights are converted, which can take minutes."""
    from penstock.text.gguf_vocab import check_vocab

    check_vocab(vocab)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    names: tuple[str, ...]
    aliases: tuple[str, ...]
    loading: Loading
    compute: Compute
    cores: Cores
    """The cores on which native kernels compute."""
    cpus: tuple[int, ...]
    """The CPUs to which threads are pinned, one each; empty: none."""
    machine_share: float
    """Weight of the model's turns on the threads that all models share."""
    policies: PolicyRecipe
    slo_itl_ns: int | None
    cache: KvConfig
    has_prefix_caching: bool
    lora: LoraConfig
    adapters: AdapterRoom
    plan: KvPlan | None
    """Plan of the KV cache. None on a GPU until `build` has loaded the weights and measured the rest."""
    share: MemoryShare
    """The model's part of the machine's memory."""
    tier_folder: Path
    expert_folder: Path | None
    """Folder for the file with a mixture's experts. None: they are in memory."""
    packed: PackedWeights | None
    """None: weights are always converted."""
    open_kv_events: Callable[[], KvEvents] | None
    """None: changes of the prefix cache are not published."""
    settings_hash: str
    shown_settings: Mapping[str, object]
    """Settings that are not the defaults, without secrets: see `ModelInfo.settings`."""
    shares_kv: bool = False
    """Other processes on this machine may read the KV cache."""
    draft: Blueprint | None = None
    """The small model that guesses this one's tokens."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def settings(self) -> ModelConfig:
        return self.loading.settings

    @property
    def measured_plan(self) -> KvPlan:
        """The plan of the KV cache. A GPU's blueprint has one only after `build` has measured the memory."""
        assert self.plan is not None
        return self.plan
