"""A GGUF file's weights as a Hugging Face directory in bf16, for peers that read only that. Run by `peers.py` beside vLLM.

    python peer_weights.py MODEL.gguf OUTPUT

Config, values and tokenizer are those of the yardstick of the parity tests (`tests/parity/reference_model.py`), with the rows
of q and k in the layout of Hugging Face. Needs torch, transformers and gguf.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.parity.reference_model import GgufReference


def main() -> None:
    reference, output = GgufReference(Path(sys.argv[1])), Path(sys.argv[2])
    reference.model(torch.bfloat16).save_pretrained(output)
    tokenizer = reference.tokenizer()
    tokenizer.save(str(output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.id_to_token(reference.eos_token_id),
        "clean_up_tokenization_spaces": False,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
