"""Makes tests/golden/tiny.npz: transformers' answers for the tiny random models. Run by hand, in an environment with torch.

    PYTHONPATH=src:tests python -m tests.parity.make_tiny_golden [NAME ...]

With names, only those cases are made afresh; answers of cases that are gone are dropped. transformers makes the model from the
case's config.json and is given the values that the file holds; every tensor that it has must be given, and none be left over.
Where it reads GGUF files of the architecture itself, ours must give it the same logits.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from support.parity.golden import GOLDEN_DIR
from support.parity.reference_model import TorchExecutor
from support.parity.simulate import bf16_cache
from support.parity.tiny import (
    NUM_STEPS,
    NUM_TOP,
    FloatArray,
    TinyCase,
    case_token_ids,
    kept_positions,
    prompts,
    weights_sha256,
    write_case,
)
from support.parity.tiny_cases import CASES

MAX_GGUF_ERROR = 1e-3
"""Between transformers' logits of the values and of a GGUF file of them, as a share of their deviation."""

MISREAD = ("falcon_40b_gguf", "gemma4_gguf", "gemma4_moe_gguf")
"""Cases whose file transformers takes for another model: it leaves Falcon's rows in the converter's order, and does not read
the factors of Gemma 4's layers."""


def read_config(case: TinyCase) -> PretrainedConfig:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(case.config)))
        return AutoConfig.from_pretrained(directory)


def make_model(case: TinyCase) -> PreTrainedModel:
    """The model in float32, in eval mode."""
    model = AutoModelForCausalLM.from_config(read_config(case), dtype=torch.float32).eval()
    missing = dict(model.named_parameters())  # a tied output has no name of its own
    ends = ("expert_bias", "correction_bias", "layer_scalar", "act_fn.beta")
    missing |= {name: buffer for name, buffer in model.named_buffers() if name.endswith(ends)}
    for name, values in case.stored_weights().items():
        with torch.no_grad():
            parameter = missing.pop(name)
            assert parameter.shape == values.shape, f"{name} is {tuple(parameter.shape)} there, {values.shape} here"
            parameter.copy_(torch.from_numpy(values))
    assert not missing, f"the case lacks {sorted(missing)}"
    return model


def check_gguf(name: str, case: TinyCase, logits: FloatArray) -> str:
    """Asks transformers' own reader of GGUF files for the logits; returns words on them. AssertionError if they are others.

    Its reader knows all names of tensors, and fewer keys of settings: these are compared if it does.
    """
    if case.gguf is None:
        return ""
    if case.gguf.architecture not in GGUF_SUPPORTED_ARCHITECTURES or name in MISREAD:
        return ", GGUF file not checked by transformers' reader"
    with tempfile.TemporaryDirectory() as directory:
        path = write_case(case, Path(directory))
        read = partial(AutoModelForCausalLM.from_pretrained, directory, gguf_file=path.name, dtype=torch.float32)
        error = relative_error(case, read(config=read_config(case)), logits)
        assert error < MAX_GGUF_ERROR, f"transformers reads another model from the GGUF file: {error:.4f}"
        # By default its sizes are those of the first model of the architecture, whose tokens may be out of range.
        with contextlib.suppress(RuntimeError, AssertionError):
            if relative_error(case, read(), logits) < MAX_GGUF_ERROR:
                return ", tensors and settings of the GGUF file as read by transformers"
    return ", tensors of the GGUF file as read by transformers"


def check_mxfp4(case: TinyCase, logits: FloatArray) -> str:
    """Asks transformers' own reader of MXFP4 for the logits; returns words on them. AssertionError if they are others."""
    if case.gguf is not None or not case.has_mxfp4_experts:
        return ""
    with tempfile.TemporaryDirectory() as directory:
        path = write_case(case, Path(directory))
        model = AutoModelForCausalLM.from_pretrained(
            path, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.float32
        )
    error = relative_error(case, model, logits)
    assert error < MAX_GGUF_ERROR, f"transformers reads another model from the MXFP4 directory: {error:.4f}"
    return ", MXFP4 as read by transformers"


def relative_error(case: TinyCase, model: PreTrainedModel, logits: FloatArray) -> float:
    with bf16_cache(model):
        theirs = TorchExecutor(model.eval()).forward_logits(case_token_ids(case))
    return float(np.sqrt(((theirs - logits) ** 2).mean()) / logits.std())


def answers(name: str, case: TinyCase) -> dict[str, np.ndarray]:
    """The arrays of one case, by their names in the file."""
    model = make_model(case)
    with bf16_cache(model):
        executor = TorchExecutor(model)
        logits = executor.forward_logits(case_token_ids(case))
        ids = np.empty((len(prompts(case)), NUM_STEPS, NUM_TOP), np.int16)
        logprobs = np.empty(ids.shape, np.float32)
        for number, prompt in enumerate(prompts(case)):
            text = list(prompt)
            for step in range(NUM_STEPS):
                scores = torch.log_softmax(torch.from_numpy(executor.forward_logits(text)[-1]).double(), -1).numpy()
                ids[number, step] = np.argsort(-scores, kind="stable")[:NUM_TOP]
                logprobs[number, step] = scores[ids[number, step]]
                text.append(int(ids[number, step, 0]))
    note = check_gguf(name, case, logits) + check_mxfp4(case, logits)
    print(f"{name}: {len(logits)} tokens, logits of {logits.std():.2f} deviation{note}")
    return {
        f"{name}/weights_sha256": np.array(weights_sha256(case)),
        f"{name}/logits": logits[kept_positions(case)],
        f"{name}/top_ids": ids,
        f"{name}/top_logprobs": logprobs,
    }


def main() -> None:
    path = GOLDEN_DIR / "tiny.npz"
    own = {name: case for name, case in CASES.items() if not case.golden}
    arrays: dict[str, np.ndarray] = {}
    with contextlib.suppress(FileNotFoundError), np.load(path) as data:
        arrays = {key: data[key] for key in data.files if key.split("/")[0] in own}
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        if not case.golden:
            arrays |= answers(name, case)
            continue
        model = make_model(case)
        with bf16_cache(model):
            logits = TorchExecutor(model).forward_logits(case_token_ids(case))
        assert np.array_equal(logits[kept_positions(case)], arrays[f"{case.golden}/logits"]), f"{name} is not {case.golden}"
        print(f"{name}: as {case.golden}{check_gguf(name, case, logits)}")
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main()
