"""Adapters through our readers and backends against PEFT's answers for the same folders. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models import architectures, catalog
from penstock.models.load import load_adapter, load_model
from penstock.models.weights import LoadedModel
from penstock.types.adapter import BASE
from penstock.types.kv_dtype import KvDtype
from support.parity.adapter_cases import ADAPTERS_DIR, RANKED, SETTINGS, TRAINED, load_logits, write_ranked, write_tiny_adapter
from support.parity.compare import CLEAR_MARGIN, MIN_CLEAR_SHARE, compare_greedy, summarise_greedy
from support.parity.executors import find_model
from support.parity.golden import FloatArray, GreedyCase, first_steps, load_greedy
from support.parity.tiny import case_token_ids, kept_positions, write_case
from support.parity.tiny_cases import CASES
from support.parity.tiny_runs import MAX_RELATIVE_RMS

BLOCK_SIZE = 16
MAX_RANK = 64
MAX_PAGES = 600
KINDS: dict[str, Callable[..., ReferenceExecutor | NativeExecutor]] = {
    "native": NativeExecutor,
    "reference": ReferenceExecutor,
}


@dataclass(frozen=True)
class Adapted:
    """An executor with adapters placed, of which one's answers are compared."""

    executor: ReferenceExecutor | NativeExecutor
    number: int

    def forward_logits(self, token_ids: Sequence[int]) -> FloatArray:
        return self.executor.forward_logits(token_ids, adapter=self.number)


def adapted(model: LoadedModel, backend: str, folders: Sequence[Path], num_tokens: int, kv_dtype: KvDtype) -> list[Adapted]:
    """An executor with the folders' adapters in its last blocks, once for each of them."""
    program = architectures.describe(model.spec)
    num_blocks = 8 + -(-num_tokens // BLOCK_SIZE)
    executor = KINDS[backend](
        model,
        program,
        num_blocks=num_blocks + MAX_PAGES,
        block_size=BLOCK_SIZE,
        max_rows=64,
        max_step_tokens=max(64, min(256, num_tokens)),
        max_model_len=model.spec.max_model_len,
        kv_dtype=kv_dtype,
        max_adapter_rank=MAX_RANK,
        **({"num_threads": 2} if backend == "native" else {}),
    )
    for number, folder in enumerate(folders, 1):
        packed = executor.adapter_packer(load_adapter(folder, model.spec, program, tables=model.weights, max_rank=MAX_RANK))
        executor.place_adapter(number, packed, range(num_blocks, num_blocks + packed.num_pages))
        num_blocks += packed.num_pages
    return [Adapted(executor, number) for number in range(1, len(folders) + 1)]


@pytest.mark.parametrize(("backend", "form"), [("reference", "all"), ("native", "products")])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_peft(tmp_path: Path, name: str, backend: str, form: str) -> None:
    """Bounds are those of the same models without adapters; PEFT's logits lie at 0.7 deviations and more from these."""
    case, wanted = CASES[name], load_logits(name, form)
    path = write_case(case, tmp_path / "base")
    model = load_model(catalog.resolve(str(path), path))
    (one,) = adapted(model, backend, [write_tiny_adapter(name, form, tmp_path / "adapter")], case.num_tokens, KvDtype.BF16)
    with closing(one.executor):
        logits = one.forward_logits(case_token_ids(case))[kept_positions(case)]
    rms = float(np.sqrt(((logits - wanted) ** 2).mean()))
    assert rms < MAX_RELATIVE_RMS[backend] * wanted.std()


NAMES = ("trained", *RANKED)
"""Adapters of the default model."""


def greedy_of(name: str) -> list[GreedyCase]:
    return load_greedy(ADAPTERS_DIR if name == "trained" else ADAPTERS_DIR / name)


@pytest.mark.parametrize("name", NAMES)
def test_the_adapters_change_most_answers(name: str) -> None:
    """Otherwise what follows would hold for a server that leaves adapters out."""
    greedy, base = greedy_of(name), {case.name: case for case in load_greedy()}
    differing = [case.name for case in greedy if not np.array_equal(case.path_ids, base[case.name].path_ids)]
    assert len(differing) >= 0.8 * len(greedy)
    margins = np.concatenate([case.margins for case in greedy])
    assert (margins > CLEAR_MARGIN).mean() >= (MIN_CLEAR_SHARE if name == "trained" else 0.6)  # random ones blur choices


@pytest.fixture(scope="module")
def default_model() -> LoadedModel:
    source = find_model()
    if not source.is_present:
        pytest.skip(f"{source.path} is missing: `penstock pull {source.name}` fetches it")
    return load_model(source)


@pytest.fixture(scope="module")
def native(default_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Adapted]]:
    """All adapters beside one model, of ranks 4 to 64."""
    longest = max(len(case.text.token_ids) for name in NAMES for case in greedy_of(name))
    folders = [TRAINED, *(write_ranked(name, tmp_path_factory.mktemp(name)) for name in RANKED)]
    found = adapted(default_model, "native", folders, longest, KvDtype.INT8)
    with closing(found[0].executor):
        yield dict(zip(NAMES, found, strict=True))


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_native_chooses_peft_s_token_at_every_clear_step(native: dict[str, Adapted], name: str) -> None:
    """As without an adapter: steps at which rounding can't decide."""
    assert summarise_greedy([compare_greedy(native[name], case) for case in greedy_of(name)]).mismatches == ()


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_the_model_s_own_answers_are_not_the_adapters(native: dict[str, Adapted], name: str) -> None:
    """The same executor without the adapter fails the test above."""
    base = Adapted(native[name].executor, BASE)
    assert summarise_greedy([compare_greedy(base, case) for case in greedy_of(name)[:3]]).mismatches


@pytest.mark.model
def test_the_reference_chooses_peft_s_token_at_every_clear_step(default_model: LoadedModel) -> None:
    case = first_steps(min(greedy_of("trained"), key=lambda one: len(one.text.token_ids)), 16)
    (one,) = adapted(default_model, "reference", [TRAINED], len(case.text.token_ids), KvDtype.BF16)
    with closing(one.executor):
        found = compare_greedy(one, case)
    assert summarise_greedy([found]).mismatches == ()
    assert float(np.abs(found.margin_errors).max()) < 0.25
