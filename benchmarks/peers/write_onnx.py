"""An encoder as ONNX files for OpenVINO and onnxruntime, in float32 and in int8. Run in the environment of these peers.

    python write_onnx.py MODEL_DIR SAMPLES.json

Writes into MODEL_DIR, from the ids and the mask of a batch to its vectors (the mean of the tokens' states, of length 1):
- `model.onnx`: float32, as torch exports it.
- `model-int8.onnx`: onnxruntime's dynamic quantisation: weights once, states as they come.
- `model-int8.xml`: OpenVINO's (NNCF's) static one, calibrated with the texts of SAMPLES.json, a list.
- `model-w8.xml`: NNCF's compression of the weights alone; OpenVINO then rounds states as they come, by groups.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nncf
import numpy as np
import openvino as ov
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from tokenizers import Tokenizer
from transformers import AutoModel


class Embedder(torch.nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


def main() -> None:
    folder, samples = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    example = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    axes = {0: "texts", 1: "tokens"}
    torch.onnx.export(
        Embedder(folder).eval(),
        tuple(example.values()),
        folder / "model.onnx",
        input_names=list(example),
        output_names=["vectors"],
        dynamic_axes=dict.fromkeys(example, axes) | {"vectors": {0: "texts"}},
        opset_version=17,
        dynamo=False,
    )
    quantize_dynamic(folder / "model.onnx", folder / "model-int8.onnx", per_channel=True, weight_type=QuantType.QInt8)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    encoded = tokenizer.encode_batch(samples)
    inputs = [{"input_ids": np.array([one.ids]), "attention_mask": np.array([one.attention_mask])} for one in encoded]
    core = ov.Core()
    calibrated = nncf.quantize(
        core.read_model(folder / "model.onnx"),
        nncf.Dataset(inputs),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(inputs),
    )
    ov.save_model(calibrated, folder / "model-int8.xml", compress_to_fp16=False)
    compressed = nncf.compress_weights(core.read_model(folder / "model.onnx"), mode=nncf.CompressWeightsMode.INT8_ASYM)
    ov.save_model(compressed, folder / "model-w8.xml", compress_to_fp16=False)


if __name__ == "__main__":
    main()
