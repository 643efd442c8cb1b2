"""Makes tests/golden/beams_*.json: what transformers' beam search finds. Run by hand, in an environment with torch.

    PYTHONPATH=src:tests python -m tests.parity.make_beam_golden tiny
    PYTHONPATH=src:tests python -m tests.parity.make_beam_golden model.gguf

Keys and values are rounded to bfloat16 for the tiny model, as in the cache that it is compared over. Our own search is fed
transformers' scores here, and must find the same hypotheses: that is also how the margins are known.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from penstock.types.result import TokenLogprobs
from support.parity.beam_cases import NUM_CASES, TINY, BeamCase, WatchedSearch, save, settings
from support.parity.golden import load_greedy
from support.parity.reference_model import GgufReference
from support.parity.simulate import bf16_cache
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES

MAX_TOKENS = 12


def search(model: PreTrainedModel, prompt_ids: list[int], number: int, stop_ids: list[int]) -> BeamCase:
    width, length_penalty, early_stopping = settings(number)
    model.generation_config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt_ids]))
    hypotheses = [_cut(row[len(prompt_ids) :].tolist(), stop_ids) for row in out.sequences]
    case = BeamCase(
        prompt_ids=prompt_ids,
        width=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_tokens=MAX_TOKENS,
        stop_ids=stop_ids,
        hypotheses=hypotheses,
        scores=[round(score, 6) for score in out.sequences_scores.tolist()],
        margin=0.0,
    )
    return _with_margin(case, out.scores)


def _cut(token_ids: list[int], stop_ids: list[int]) -> list[int]:
    """Without the padding behind the first stop token."""
    ends = [idx for idx, token_id in enumerate(token_ids) if token_id in stop_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids


def _with_margin(case: BeamCase, scores: tuple[torch.Tensor, ...]) -> BeamCase:
    """Raises AssertionError if our search finds anything else in the same scores."""
    ours = WatchedSearch(case.params, frozenset(case.stop_ids), case.max_tokens)
    for step in scores:
        assert not ours.is_done, "ours ended before"
        tops = []
        for row in step[: len(ours.beams)]:
            values, ids = torch.topk(row, case.width + len(case.stop_ids))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            tops.append(TokenLogprobs(top[0][0], top[0][1], 1, top))
        ours.advance(tops)
    assert ours.is_done, "ours did not end"
    ours.note_end()
    found = [list(beam.token_ids) for beam in ours.finished]
    assert found == case.hypotheses, (found, case.hypotheses)
    fields = {name: getattr(case, name) for name in BeamCase.__dataclass_fields__}
    return BeamCase(**(fields | {"margin": round(ours.margin, 6)}))


def tiny_cases() -> list[BeamCase]:
    """Prompts of 1 to 40 tokens; the stop token is one that the model likes to say."""
    case = CASES[TINY]
    with tempfile.TemporaryDirectory() as directory:
        model = AutoModelForCausalLM.from_pretrained(write_case(case, Path(directory)), dtype=torch.float32).eval()
        found = []
        with bf16_cache(model):
            for number in range(NUM_CASES):
                prompt = [(5 * i * i + 17 * i + 29 * number) % case.vocab_size for i in range(1 + 2 * number)]
                free = search(model, prompt, number, [case.vocab_size - 1])
                found.append(search(model, prompt, number, [free.hypotheses[0][number % 5 % len(free.hypotheses[0])]]))
    return found


def model_cases(path: Path) -> list[BeamCase]:
    """The shortest of the golden prompts."""
    reference = GgufReference(path)
    model = reference.model()
    eos = int(reference.config().eos_token_id)
    prompts = sorted((case.prompt_ids for case in load_greedy()), key=len)[:NUM_CASES]
    return [search(model, [int(i) for i in prompt], number, [eos]) for number, prompt in enumerate(prompts)]


def main() -> None:
    what = sys.argv[1]
    cases = tiny_cases() if what == "tiny" else model_cases(Path(what))
    for case in cases:
        print(f"{len(case.prompt_ids)} tokens, width {case.width}: margin {case.margin}, best {case.hypotheses[0]}")
    save("tiny" if what == "tiny" else "default", cases)


if __name__ == "__main__":
    main()
