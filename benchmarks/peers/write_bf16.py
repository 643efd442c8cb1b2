"""A GGUF file's weights as a Hugging Face directory in bf16, for peers that read only that. Run by `peers.py` beside vLLM.

    python write_bf16.py MODEL.gguf OUTPUT

Config, values, tokenizer and chat template are those of the yardstick of the parity tests
(`tests/support/parity/reference_model.py`), with the rows of q and k in the layout of Hugging Face. Needs torch, transformers
and gguf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.parity.reference_model import GgufReference


def write_model(reference: GgufReference, output: Path) -> None:
    """Config and weights; only one tensor at a time is held in float32."""
    config = reference.config()
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[reference.architecture]]
    config.dtype = torch.bfloat16
    config.save_pretrained(output)
    state = {name: values.to(torch.bfloat16) for name, values in reference.state(config)}
    save_file(state, output / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(reference: GgufReference, output: Path) -> None:
    tokenizer = reference.tokenizer()
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.id_to_token(reference.config().eos_token_id),
        "clean_up_tokenization_spaces": False,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings))
    (output / "chat_template.jinja").write_text(reference.chat_template)


def main() -> None:
    reference, output = GgufReference(Path(sys.argv[1])), Path(sys.argv[2])
    output.mkdir(parents=True, exist_ok=True)
    write_model(reference, output)
    write_tokenizer(reference, output)


if __name__ == "__main__":
    main()
