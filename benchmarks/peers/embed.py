"""A library that embeds texts in its own process, driven by lines of JSON. Run by `encoder_peers.py` in the peers' environment.

    python embed.py ENGINE MODEL_DIR [NAME=VALUE ...]

ENGINE is a function below; the options are its arguments. MODEL_DIR is all-MiniLM-L6-v2 as Hugging Face has it; for ONNX the
file that `write_onnx.py` made of it. Prints `ready` once the model is loaded. Then each line of input is
{"texts": [...], "one_by_one": bool, "vectors": FILE.npy or null}, and each line of output {"seconds": [...]}: of all texts
together, or of each. A run ends with the vectors in memory, in the order of the texts. Imports nothing of Penstock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

Embed = Callable[[list[str]], np.ndarray]
MAX_TOKENS = 512
LOCK = Lock()
Batch = tuple[list[int], np.ndarray, np.ndarray]
"""The places of its texts, their ids and the mask of what is no padding."""


class Batches:
    """Tokenize texts in groups of similar length, to keep padding small."""

    def __init__(self, folder: Path, batch: int, tokens: int) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.no_padding()
        self._batch, self._tokens = batch, tokens

    def __call__(self, texts: list[str]) -> Iterator[Batch]:
        """Batches of at most `batch` texts and, padding included, `tokens` tokens; a longer text is one by itself."""
        ids = [one.ids for one in self._tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
        while order:
            width = len(ids[order[0]])
            count = max(1, min(self._batch, self._tokens // width))
            places, order = order[:count], order[count:]
            padded, mask = np.zeros((2, len(places), width), np.int64)
            for row, place in enumerate(places):
                padded[row, : len(ids[place])], mask[row, : len(ids[place])] = ids[place], 1
            yield places, padded, mask


def openvino(
    folder: Path, streams: int, file: str = "model.onnx", precision: str = "f32", batch: int = 32, tokens: int = 512
) -> tuple[Embed, Embed]:
    """(for many texts, for one): with several streams, and with all threads on one text."""
    import openvino as ov

    core, batches = ov.Core(), Batches(folder, batch, tokens)
    common = {"INFERENCE_PRECISION_HINT": precision}
    many = core.compile_model(folder / file, "CPU", {**common, "PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": str(streams)})
    one = core.compile_model(folder / file, "CPU", {**common, "PERFORMANCE_HINT": "LATENCY"})
    queue = ov.AsyncInferQueue(many, streams)
    request = one.create_infer_request()

    def embed(texts: list[str]) -> np.ndarray:
        found: list[tuple[list[int], np.ndarray]] = []
        queue.set_callback(lambda done, places: found.append((places, done.get_output_tensor(0).data.copy())))
        for places, ids, mask in batches(texts):
            queue.start_async([ids, mask], places)
        queue.wait_all()
        return in_order(found)

    def embed_one(texts: list[str]) -> np.ndarray:
        return in_order([(places, request.infer([ids, mask])[0]) for places, ids, mask in batches(texts)])

    return embed, embed_one


def onnxruntime(
    folder: Path, streams: int, file: str = "model.onnx", threads: int = 1, batch: int = 32, tokens: int = 512
) -> tuple[Embed, Embed]:
    """`streams`: how many batches are under way at once, each with `threads` of its own."""
    import onnxruntime as ort

    batches = Batches(folder, batch, tokens)

    def session(num_threads: int) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        return ort.InferenceSession(str(folder / file), options, providers=["CPUExecutionProvider"])

    sessions = [session(threads) for _ in range(streams)]
    alone = sessions[0] if streams == 1 else session(streams * threads)
    pool = ThreadPoolExecutor(streams)

    def run(using: Any, part: Batch) -> tuple[list[int], np.ndarray]:
        places, ids, mask = part
        return places, using.run(None, {"input_ids": ids, "attention_mask": mask})[0]

    def embed(texts: list[str]) -> np.ndarray:
        parts = batches(texts)  # each stream takes the next one

        def work(using: Any) -> list[tuple[list[int], np.ndarray]]:
            return [run(using, part) for part in iter(lambda: next_of(parts), None)]

        return in_order([one for found in pool.map(work, sessions) for one in found])

    return embed, lambda texts: in_order([run(alone, part) for part in batches(texts)])


def sentence_transformers(folder: Path, dtype: str = "float32", batch: int = 32) -> tuple[Embed, Embed]:
    """It sorts the texts by length itself."""
    import sentence_transformers as st
    import torch

    model = st.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    model.max_seq_length = MAX_TOKENS

    def embed(texts: list[str]) -> np.ndarray:
        return model.encode(texts, batch_size=batch, show_progress_bar=False, convert_to_numpy=True)

    return embed, embed


def next_of(parts: Iterator[Batch]) -> Batch | None:
    """The next batch; None at the end. One thread at a time may ask a generator."""
    with LOCK:
        return next(parts, None)


def in_order(found: list[tuple[list[int], np.ndarray]]) -> np.ndarray:
    vectors = np.empty((sum(len(places) for places, _ in found), found[0][1].shape[1]), np.float32)
    for places, part in found:
        vectors[places] = part
    return vectors


def main() -> None:
    engine, folder, *words = sys.argv[1:]
    options = {name: int(value) if value.isdecimal() else value for name, _, value in (word.partition("=") for word in words)}
    many, one = {"openvino": openvino, "onnxruntime": onnxruntime, "sentence-transformers": sentence_transformers}[engine](
        Path(folder), **options
    )
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        seconds, vectors = [], []
        for texts in [[text] for text in order["texts"]] if order["one_by_one"] else [order["texts"]]:
            start_s = time.perf_counter()
            vectors.append((one if order["one_by_one"] else many)(texts))
            seconds.append(time.perf_counter() - start_s)
        if order["vectors"]:
            np.save(order["vectors"], np.concatenate(vectors))
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
