"""How near does a mixture of experts come to what memory allows, and is it as fast as llama.cpp?

A model of random weights of 4 bits (Q4_0) in the shape of small mixtures: 24 layers of 32 experts, to 8 of which each token is
sent. Its router sends tokens evenly, so that rows share as few experts as can be. Steps of 1, 8 and 32 rows after 128 positions
are measured straight through the executor, as by `step.py`. The bound is the time to read a step's bytes from memory, with
as many experts as that many tokens reach on average. With a llama.cpp build's `llama-batched-bench`, its generation after the
same positions is measured before and after, on the same file and as many threads.

    python benchmarks/experts.py
    python benchmarks/experts.py --llama build/bin/llama-batched-bench
    systemd-run --scope -p MemoryMax=500M python benchmarks/experts.py --on-disk build

The last command's memory holds about half of the experts, as with `penstock serve --experts-on-disk`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from kernel_engines import wait_for_huge_pages
from peaks import PeakMeter
from printed import origin, percent, table
from step import open_executor, plan_shape
from step_shape import StepShape

from penstock.lab.sizing import size_of
from penstock.lab.step_table import Peaks, figures_of
from penstock.lab.steps import StepRunner, measure
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.types.kv_dtype import KvDtype

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 24, 1024, 16, 8, 64
EXPERTS, CHOSEN, WIDTH, VOCAB_SIZE = 32, 8, 512, 32_000
CONTEXT, GENERATED = 128, 16
ROWS = (1, 8, 32)
BLOCK, BLOCK_BYTES = 32, 18


def write_model(path: Path) -> None:
    """A GGUF file that both can read."""
    rng = np.random.default_rng(1)
    writer = GGUFWriter(path, "llama")
    numbers = {
        **{"block_count": LAYERS, "context_length": 4096, "embedding_length": HIDDEN, "feed_forward_length": WIDTH},
        **{"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM},
        **{"expert_count": EXPERTS, "expert_used_count": CHOSEN, "vocab_size": VOCAB_SIZE},
    }
    for key, number in numbers.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *(f"t{i}" for i in range(VOCAB_SIZE - len(special)))])
    writer.add_token_scores([0.0] * VOCAB_SIZE)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (VOCAB_SIZE - len(special))])

    def matrix(name: str, *shape: int) -> None:
        # Never 0, which means -8: with a nonzero mean, tokens become alike within a few layers and reach the same experts.
        halves = rng.integers(1, 16, (2, int(np.prod(shape)) // BLOCK, BLOCK_BYTES), np.uint8)
        blocks = halves[0] | halves[1] << 4
        scales = (0.2 / np.sqrt(shape[-1]) * rng.uniform(0.8, 1.2, len(blocks))).astype(np.float16)
        blocks[:, :2] = scales[:, None].view(np.uint8)
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=GGMLQuantizationType.Q4_0)

    def floats(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.standard_normal(shape, np.float32) if len(shape) > 1 else np.ones(shape, np.float32))

    matrix("token_embd.weight", VOCAB_SIZE, HIDDEN)
    matrix("output.weight", VOCAB_SIZE, HIDDEN)
    floats("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        floats(f"{at}.attn_norm.weight", HIDDEN)
        floats(f"{at}.ffn_norm.weight", HIDDEN)
        floats(f"{at}.ffn_gate_inp.weight", EXPERTS, HIDDEN)
        for name, rows in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items():
            matrix(f"{at}.attn_{name}.weight", rows * HEAD_DIM, HIDDEN)
        matrix(f"{at}.attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate", "up"):
            matrix(f"{at}.ffn_{name}_exps.weight", EXPERTS, WIDTH, HIDDEN)
        matrix(f"{at}.ffn_down_exps.weight", EXPERTS, HIDDEN, WIDTH)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()


def llama_ms(program: Path, model: Path, threads: int) -> Mapping[int, float]:
    """Milliseconds of a step by its rows."""
    each = str(CONTEXT), str(GENERATED), ",".join(map(str, ROWS))
    options = [f for pair in zip(("-npp", "-ntg", "-npl"), each, strict=True) for f in pair]
    command = [program, "-m", model, "-t", str(threads), "-c", "8192", "-b", "512", "--output-format", "jsonl", *options]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {line["pl"]: 1000 * line["t_tg"] / line["tg"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/experts.gguf"), help="made if it is not there")
    parser.add_argument("--rounds", type=int, default=15, help="each step once in each")
    parser.add_argument("--llama", type=Path, help="llama-batched-bench")
    parser.add_argument("--on-disk", type=Path, metavar="FOLDER", help="the experts lie in a file there")
    args = parser.parse_args()
    if not args.model.exists():
        args.model.parent.mkdir(parents=True, exist_ok=True)
        write_model(args.model)
    model = load_gguf(args.model)
    shapes = [StepShape(rows, 1, CONTEXT) for rows in ROWS]
    with tempfile.TemporaryFile(dir=args.on_disk) as file:
        executor = open_executor(model, shapes, 0, "", KvDtype.INT8, file.fileno() if args.on_disk else None)
    threads = executor.num_threads
    theirs = [llama_ms(args.llama, args.model, threads)] if args.llama else []
    wait_for_huge_pages(executor)
    runner = StepRunner(executor, VOCAB_SIZE)
    runner.fill()
    meter = PeakMeter(threads, executor.variant)
    plans = [plan_shape(shape) for shape in shapes]
    ours, _ = measure(runner, plans, num_rounds=args.rounds, progress=lambda *_: meter.sample(["int8", "read"], repeat=1))
    theirs += [llama_ms(args.llama, args.model, threads)] if args.llama else []
    held = model.num_weight_bytes
    program, num_bytes = architectures.describe(model.spec), {"num_weight_bytes": held, "num_read_bytes": held}
    size = size_of(program, name=model.name, kv_dtype=KvDtype.INT8, is_quantised=True, **num_bytes)
    peaks = Peaks(ops_per_s=1e9 * meter.median("int8"), read_bytes_per_s=1e9 * meter.median("read"), words="int8")
    rows, found = [], {}
    for shape, figures in zip(shapes, figures_of(ours, size, peaks), strict=True):
        ms, share = figures.duration_ns / 1e6, figures.read_share or 0.0
        others = [run[shape.rows] for run in theirs]
        beside = [f"{min(others):.1f} to {max(others):.1f}", f"{statistics.mean(others) / ms:.2f}"] if others else ["", ""]
        rows.append([shape.rows, f"{ms:.2f}", f"{figures.num_bytes / 2**20:.0f}", f"**{percent(share)}**", *beside])
        found[shape.rows] = {"ms": round(ms, 3), "read_share": round(share, 3), "llama_ms": [round(one, 3) for one in others]}
    read = f"reads {meter.median('read'):.1f} GB/s"
    print(origin(f"{held / 2**20:.0f} MiB of weights", executor.variant, f"{threads} threads", read))
    print(table(["rows", "ms", "MiB that it reads", "share of the bound", "llama.cpp ms", "its time over ours"], rows))
    print(json.dumps(found))
    executor.close()


if __name__ == "__main__":
    main()
