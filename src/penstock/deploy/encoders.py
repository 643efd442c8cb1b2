"""Settings of a model that reads texts and writes none: the factory asks for them once its files say that it is one.

A text is read whole, in one step, and nothing is kept of it. So there is no KV cache to size; a step must have room for the
longest text; and a block of the pool is no more than a text's place in a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.config.setting import settings_of
from penstock.deploy.device import max_step_tokens
from penstock.deploy.sizing import KvPlan
from penstock.types.errors import ConfigError
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.models.weights import LoadedModel
    from penstock.types.model_spec import ModelSpec

MAX_ROWS = 256
"""Texts of one step by default. They need no memory but that of their tokens."""
_KV_SETTINGS_OF_TEXTS = frozenset({"prefix_sharing"})
"""Settings of the KV cache that mean something to texts: equal ones are computed once for all who share prefixes."""
_BLOCK_MULTIPLE = 16


def plan_encoder(config: Config, model: LoadedModel) -> tuple[Config, KvPlan]:
    """The settled config with the settings that texts need, and their capacity, without memory for keys and values.

    Raises ConfigError for settings that mean nothing to texts, or leave no room for the longest one.
    """
    _check_settings(config, model)
    max_len = _max_tokens(config, model)
    rows = config.scheduler.max_num_seqs or MAX_ROWS
    step_tokens = config.scheduler.max_num_batched_tokens or max(max_step_tokens(config), max_len)
    if step_tokens < max_len:
        raise ConfigError(
            f"max_num_batched_tokens is {step_tokens}, and a text of {model.name} may have {max_len} tokens, which one step "
            "computes.",
            remedy=f"Set --max-num-batched-tokens to {max_len} or more, or --max-model-len to {step_tokens} or less.",
        )
    config = replace(
        config,
        model=replace(config.model, max_model_len=max_len),
        kv=replace(config.kv, prefix_caching=False),
        scheduler=replace(config.scheduler, max_num_seqs=rows, max_num_batched_tokens=step_tokens),
    )
    # Two steps may be in flight, and block 0 is nobody's.
    capacity = Capacity(2 * rows + 1, block_size_of(max_len), rows, step_tokens, max_len, is_one_pass=True)
    return config, KvPlan(capacity, num_bytes=0, is_shortened=False)


def block_size_of(max_len: int) -> int:
    """Positions of a text's place in a step. The setting of that name has nothing to do with it: it is of the KV cache."""
    return -(-max_len // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE


def require_answers(name: str, spec: ModelSpec, what: str) -> None:
    """Raise ConfigError for an encoder, where only models that write text are known: `what` forecasts or measures them."""
    if spec.ending is not None:
        raise ConfigError(
            f"{name} reads texts and writes none, and {what} knows only models that write.",
            remedy="Name a model that writes text, or measure a server of this one (penstock bench --endpoint embeddings).",
        )


def _max_tokens(config: Config, model: LoadedModel) -> int:
    """The longest text: what is asked for, else what the model's files say."""
    assert model.encoder is not None
    asked, limit = config.model.max_model_len, model.spec.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len {asked} is longer than the model's own {limit} positions.",
            remedy=f"Set --max-model-len to {limit} or less.",
        )
    return asked or model.encoder.max_tokens


def _check_settings(config: Config, model: LoadedModel) -> None:
    """Refuse what would change nothing, by name. Raises ConfigError."""
    why = f"{model.name} reads texts and writes none"
    for item in settings_of(type(config.kv)):
        if item.field not in _KV_SETTINGS_OF_TEXTS and getattr(config.kv, item.field) != item.default:
            raise ConfigError(
                f"{item.key} is a setting of the KV cache, and {why}: it has none.",
                remedy=f"Leave {item.key} out; of several models set it in the tables [[models]] of those that have one.",
            )
    for key, is_given in (
        ("chat_template", config.model.chat_template is not None),
        ("tool_call_parser", config.model.tool_call_parser != "auto"),
        ("reasoning_parser", config.model.reasoning_parser != "auto"),
        ("experts_on_disk", config.model.experts_on_disk),
        ("record", config.server.record is not None),
        ("cuda_graphs", config.backend.cuda_graphs is not None),
    ):
        if is_given:
            raise ConfigError(f"{key} is set, and {why}: it would change nothing.", remedy=f"Leave {key} out.")
