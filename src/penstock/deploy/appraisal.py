"""An appraisal of a model: its facts, all that a server would refuse, and the memory that it would take. `cli.show` prints it.

Every check is the one that a start makes (loader, tokenizer, template, backend, memory plan). Here one that fails does not
keep the others from being made. No weight is read, and no kernel runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.deploy import device
from penstock.deploy.encoders import plan_encoder
from penstock.deploy.experts import check_disk
from penstock.deploy.forecast import Forecast, Outline, forecast, outline_of
from penstock.machine import available_memory_bytes
from penstock.types.errors import PenstockError

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.models.catalog import ModelSource
    from penstock.models.facts import ModelFacts
    from penstock.models.weights import LoadedModel
    from penstock.text.tokenizer import Tokenizer
    from penstock.types.vocab import GgufVocab


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A check that failed."""

    check: str
    """The thing that was checked: weights, tokenizer, chat template, sampling, backend, disk or memory."""
    cause: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Appraisal:
    facts: ModelFacts
    refusals: tuple[Refusal, ...]
    """Empty if a server can be started."""
    model: LoadedModel | None
    """None if the weights or the settings are refused: then nothing below is known."""
    outline: Outline | None
    forecast: Forecast | None
    """The memory plan of a server on this machine's processors; None if it does not fit, too, and for an encoder, which keeps
    no keys and values."""
    num_free_bytes: int
    """Memory that is available now."""


def appraise(config: Config, source: ModelSource) -> Appraisal:
    """Check a source that is present, for a server on this machine's processors. Raises ModelError if it can't be read."""
    from penstock.models.facts import read_facts

    facts, refusals = read_facts(source), list[Refusal]()
    model, outline, expected = None, None, None
    with _check("weights", refusals):
        model = _load(source)
    _check_text(config, source, facts, model, refusals)
    free_bytes = available_memory_bytes()
    if model is not None:
        with _check("sampling", refusals):
            model = _with_sampling(config, model)
        with _check("backend", refusals):
            _check_backend(config, model)
        outline = outline_of(config, model, is_gpu=False)
        with _check("disk", refusals):
            check_disk(device.settled_elsewhere(config, is_gpu=False), model)
        with _check("memory", refusals):
            if model.encoder is None:
                expected = forecast(config, outline, is_gpu=False, memory_bytes=free_bytes)
            else:
                plan_encoder(device.settled_elsewhere(config, is_gpu=False), model)
    return Appraisal(
        facts=facts,
        refusals=tuple(refusals),
        model=model,
        outline=outline,
        forecast=expected,
        num_free_bytes=free_bytes,
    )


@contextmanager
def _check(name: str, refusals: list[Refusal]) -> Iterator[None]:
    """Note the error that ends the block."""
    try:
        yield
    except PenstockError as error:
        refusals.append(Refusal(check=name, cause=error.message, remedy=error.remedy))


def _load(source: ModelSource) -> LoadedModel:
    from penstock.models.load import load_model

    return load_model(source)


def _check_text(
    config: Config, source: ModelSource, facts: ModelFacts, model: LoadedModel | None, refusals: list[Refusal]
) -> None:
    """The tokenizer and the template, which a file has whether its weights are refused or not."""
    from penstock.text.chat import ChatTemplate, choose_chat_template
    from penstock.text.tokenizer import load_tokenizer

    tokenizer: Tokenizer | None = None
    with _check("tokenizer", refusals):
        if model is None:
            tokenizer = load_tokenizer(_tokenizer_source(source))
        else:
            tokenizer = load_tokenizer(model.tokenizer_source, special_tokens=model.special_tokens, ends=model.ends)
    with _check("chat template", refusals):
        template = choose_chat_template(config.model.chat_template, facts.chat_templates)
        if template is not None:
            ChatTemplate(template, special_tokens={} if tokenizer is None else tokenizer.special_tokens)


def _tokenizer_source(source: ModelSource) -> Path | GgufVocab:
    """The vocabulary of files whose weights are refused."""
    from penstock.models.catalog import SourceKind
    from penstock.models.gguf import read_vocab
    from penstock.models.gguf_file import open_gguf
    from penstock.models.hf_text import find_tokenizer

    if source.kind is SourceKind.DIRECTORY:
        return find_tokenizer(source.path)
    file = open_gguf(source.path)
    return read_vocab(file, len(file.get_list("tokenizer.ggml.tokens", str)))


def _with_sampling(config: Config, model: LoadedModel) -> LoadedModel:
    from penstock.models.generation import obeying

    return obeying(model, config.model.generation_config)


def _check_backend(config: Config, model: LoadedModel) -> None:
    from penstock.backends.native.lowering import check_program
    from penstock.config import Backend
    from penstock.models.architectures import describe

    config = device.settled_elsewhere(config, is_gpu=False)
    program = describe(model.spec)
    device.check_block_size(config)
    device.check_head_dim(config, model)
    device.check_state(config, model)
    if config.backend.backend == Backend.NATIVE:
        check_program(program)
