"""Which throughput and inter-token latency does a GPU reach? Beside transformers' own continuous batching on the
same GPU, in the same run.

    python benchmarks/gpu_serve.py [--shapes 135m 1.5b 8b] [--requests 512] [--rows 256] [--repeat 3]
    python benchmarks/gpu_serve.py --self-test       # a tiny shape, in Triton's interpreter where there is no GPU

In process: engine, scheduler, KV manager and executor as in the server, without text and HTTP. Weights are random
(`gpu_shapes.py`), prompts and replies have the lengths of ShareGPT, all requests arrive at the start and at most `rows` run
at a time. Greedy, without a prefix cache. Each contender in turn has the GPU to itself and runs `repeat` times after a warm-up;
figures are medians, with the throughput's range. Attention is FlashInfer's where it is installed and a trial at the start
finds it faster, as in the server (`--attention`). `itl` is the time between two tokens of a request. The peer gets the same
tokens in and gives as many out, with its own choice of batch and cache sizes, CUDA graphs and attention (flash-attn, where that
is installed).

The bound is the least time in which this GPU could give all replies with at most `rows` at a time, however they are scheduled:
the larger of all operations at the peak of a bf16 product and all bytes (weights once per unavoidable step, KV) at the speed
of a copy, both measured before and after each turn. `share` is the bound over our time. The bound does not apply to the peer,
which chooses its own rows.

At the end it prints tables, and in the last line one JSON object. Without a GPU that can be used it says why and ends with 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_peaks import DeviceClock, GpuPeaks, context, require_gpu, rounded, use_interpreter
from gpu_shapes import SHAPES, Shape, prompts, random_model, sharegpt_lengths
from gpu_tables import Result, above_the_bound, figure, show
from gpu_work import ModelWork, Work
from printed import percent, table

from penstock.clock import WallClock
from penstock.deploy.executor import CAPTURE_SECONDS
from penstock.engine.core import EngineCore
from penstock.engine.output import OutputStage
from penstock.engine.ports import OutputChunk
from penstock.engine.thread import Engine
from penstock.models.architectures import describe
from penstock.models.formats import WeightFormat
from penstock.sched.policies.presets import make_policies
from penstock.sched.scheduler import Scheduler
from penstock.types.kv_dtype import KvDtype
from penstock.types.request import FinishReason, Request
from penstock.types.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.backends.cuda.executor import CudaExecutor

BLOCK_SIZE = 16
Jobs = list[tuple[tuple[int, ...], int]]
"""(prompt, tokens of the reply)."""


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one replay."""

    seconds: float
    num_tokens: int
    """Tokens of the replies."""
    gaps_s: list[float]
    """Between two tokens of a request, of all requests."""

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.gaps_s) or [0.0]
        return {
            "output_tokens_per_s": self.num_tokens / self.seconds,
            "itl_p50_ms": 1e3 * statistics.median(ordered),
            "itl_p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "seconds": self.seconds,
        }


class NoText:
    """A detokenizer that returns no text."""

    def push(self, token_ids: Sequence[int]) -> str:
        del token_ids
        return ""

    def flush(self) -> str:
        return ""


class Penstock:
    """The engine over an executor, with a thread of its own."""

    def __init__(self, executor: CudaExecutor) -> None:
        from penstock.backends.cuda.memory import row_lens, run_largest_steps, run_small_steps

        lens = row_lens(executor.capacity)
        run_largest_steps(executor, lens)
        run_small_steps(executor, lens[0])
        self.attention = ", ".join(f"{kind} {name}" for kind, name in executor.choose_attention().items())
        done = executor.capture_graphs(max_seconds=CAPTURE_SECONDS)
        print(f"{done.num_captured} graphs captured in {done.seconds:.1f} s, {done.num_left} left", flush=True)
        self._clock = WallClock()
        self._chunks: dict[str, list[tuple[int, int]]] = {}
        """By request: (time, tokens)."""
        self._num_left = 0
        self._failed = ""
        self._is_done = threading.Event()
        policies = make_policies(budget="decode-first")
        core = EngineCore(Scheduler(executor.capacity, policies, enable_prefix_caching=False))
        output = OutputStage(lambda _: NoText())
        self._engine = Engine(core, executor, output, clock=self._clock, sink=self._take)
        self._engine.start()
        self._num_replays = 0

    def replay(self, jobs: Jobs) -> Run:
        self._num_replays += 1
        self._chunks, self._num_left = {}, len(jobs)
        self._is_done.clear()
        start_s = time.perf_counter()
        for idx, (prompt, num_reply) in enumerate(jobs):
            sampling = SamplingParams(temperature=0.0, max_tokens=num_reply)
            self._engine.submit(Request(f"{self._num_replays}-{idx}", prompt, sampling, self._clock.now_ns()))
        self._is_done.wait()
        seconds = time.perf_counter() - start_s
        if self._failed:
            raise RuntimeError(self._failed)
        times = [[at_ns for at_ns, count in chunks if count] for chunks in self._chunks.values()]
        num_tokens = sum(count for chunks in self._chunks.values() for _, count in chunks)
        assert num_tokens == sum(num_reply for _, num_reply in jobs), "replies are as long as asked for"
        return Run(seconds, num_tokens, [(after - before) / 1e9 for each in times for before, after in pairwise(each)])

    def close(self) -> None:
        self._engine.close(30.0)

    def _take(self, chunks: list[OutputChunk]) -> None:
        """On the engine's thread."""
        for chunk in chunks:
            self._chunks.setdefault(chunk.request_id, []).append((chunk.at_ns, len(chunk.token_ids)))
            if chunk.finish_reason is not None:
                self._num_left -= 1
                if chunk.finish_reason is not FinishReason.LENGTH:
                    self._failed = chunk.detail or str(chunk.finish_reason)
        if not self._num_left or self._failed:
            self._is_done.set()


class Transformers:
    """`ContinuousBatchingManager` over a model of the same shape, random weights made on the device."""

    def __init__(self, shape: Shape, jobs: Jobs, device: str = "cuda") -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen2Config
        from transformers.generation import ContinuousBatchingConfig

        make_config = Qwen2Config if shape.has_qkv_bias else LlamaConfig
        config = make_config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_model_len,
            tie_word_embeddings=shape.is_tied,
        )
        with torch.device(device):
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        longest = max(num_reply for _, num_reply in jobs)
        greedy = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._context = self._model.continuous_batching_context_manager(
            generation_config=greedy,
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False),
            workload_hints=_workload_hints(jobs),
        )
        self._manager = self._context.__enter__()
        self.attention = str(self._model.config._attn_implementation)

    def replay(self, jobs: Jobs) -> Run:
        start_s = time.perf_counter()
        for prompt, num_reply in jobs:
            self._manager.add_request(list(prompt), max_new_tokens=num_reply, record_timestamps=True, eos_token_id=-1)
        num_tokens, gaps_s, num_left = 0, [], len(jobs)
        while num_left:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' generation thread has ended")
                continue
            if not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            num_left -= 1
            num_tokens += len(result.generated_tokens)
            gaps_s += [after - before for before, after in pairwise(result.timestamps or [])]
        seconds = time.perf_counter() - start_s
        assert num_tokens == sum(num_reply for _, num_reply in jobs), "replies are as long as asked for"
        return Run(seconds, num_tokens, gaps_s)

    def close(self) -> None:
        self._context.__exit__(None, None, None)
        del self._manager, self._model


def _workload_hints(jobs: Jobs) -> Any:
    """Hints with which the peer chooses its sizes, as `generate_batch` gives it."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    longest_prompt, longest_reply = max(len(prompt) for prompt, _ in jobs), max(num_reply for _, num_reply in jobs)
    return WorkloadHints(max_prompt_length=longest_prompt, max_generated_length=longest_reply, num_requests=len(jobs))


def package_version(name: str) -> str | None:
    """None: it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def leave_folder() -> None:
    """Take this folder off the path of imports: transformers looks for a package `kernels`, and would find our benchmark."""
    here = Path(__file__).parent.resolve()
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]


def why_no_peer() -> str | None:
    leave_folder()
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    import transformers

    if not hasattr(transformers.GenerationMixin, "continuous_batching_context_manager"):
        return f"transformers {transformers.__version__} has no continuous batching of this form (5.x has)"
    return None


def make_executor(shape: Shape, jobs: Jobs, args: argparse.Namespace) -> CudaExecutor:
    from penstock.backends.cuda.executor import CudaExecutor

    model = random_model(shape, WeightFormat(args.format))
    longest = max(len(prompt) + num_reply for prompt, num_reply in jobs)
    options: dict[str, Any] = {"deterministic": args.deterministic, "attention": args.attention}
    if args.device == "cpu":
        import torch

        options |= {"device": "cpu", "dtype": torch.float32}
    return CudaExecutor(
        model,
        describe(model.spec),
        num_blocks=1 + args.rows * -(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_rows=args.rows,
        max_step_tokens=args.step_tokens,
        max_model_len=longest,
        kv_dtype=KvDtype(args.kv_cache_dtype),
        **options,
    )


@contextmanager
def closing(engine: Any) -> Iterator[Any]:
    """Close the engine at the end and free its memory, so that the next has the whole GPU."""
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure(make: Callable[[], Any], jobs: Jobs, repeat: int) -> tuple[str, dict[str, float], list[dict[str, float]]]:
    """The backend of its attention, the figures of the first run, and those of each of `repeat` others."""
    with closing(make()) as engine:
        first = engine.replay(jobs).figures()
        return engine.attention, first, [engine.replay(jobs).figures() for _ in range(repeat)]


def summary(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians, and the range of the throughput."""
    medians: dict[str, Any] = {key: rounded(statistics.median(run[key] for run in runs)) for key in runs[0]}
    rates = [rounded(run["output_tokens_per_s"]) for run in runs]
    return medians | {"output_tokens_per_s_range": [min(rates), max(rates)]}


def make_jobs(shape: Shape, args: argparse.Namespace) -> Jobs:
    lengths = sharegpt_lengths(args.requests)
    if args.self_test:
        lengths = [(num_prompt % 20 + 1, num_reply % 4 + 2) for num_prompt, num_reply in lengths]
    return list(zip(prompts(lengths, shape.vocab_size), (num_reply for _, num_reply in lengths), strict=True))


def compare(shape: Shape, jobs: Jobs, args: argparse.Namespace, peaks: GpuPeaks, *, has_peer: bool) -> dict[str, Any]:
    contenders: dict[str, Callable[[], Any]] = {"penstock": lambda: Penstock(make_executor(shape, jobs, args))}
    if has_peer:
        contenders["transformers"] = lambda: Transformers(shape, jobs)
    report: dict[str, Any] = {"like": shape.like, "num_weights": shape.num_weights}
    sample(peaks)
    for who, make in contenders.items():
        attention, first, runs = measure(make, jobs, args.repeat)
        sample(peaks)
        for told, run in ((f"{who}, first run", first), *((who, run) for run in runs)):
            print(f"{shape.like} {told}: " + ", ".join(f"{key} {value:.4g}" for key, value in run.items()), flush=True)
        report[who] = {"attention": attention, "first": {key: rounded(value) for key, value in first.items()}, **summary(runs)}
    if has_peer:
        ours, theirs = (report[who]["output_tokens_per_s"] for who in contenders)
        report["times_transformers"] = rounded(ours / theirs)
    return report


def sample(peaks: GpuPeaks) -> None:
    """Sample while the GPU is idle, then free the memory."""
    peaks.sample()
    peaks.release()


def least_work(shape: Shape, jobs: Jobs, args: argparse.Namespace) -> Work:
    kv_bytes = 1 if KvDtype(args.kv_cache_dtype) is KvDtype.INT8 else 2  # without the scales of int8
    lengths = [(len(prompt), num_reply) for prompt, num_reply in jobs]
    return ModelWork(shape, WeightFormat(args.format), kv_bytes=kv_bytes).of_requests(lengths, args.rows)


def add_bound(report: dict[str, Any], shape: Shape, jobs: Jobs, args: argparse.Namespace, peaks: GpuPeaks) -> None:
    """Add the bound and our share, at the whole run's best peaks."""
    work = least_work(shape, jobs, args)
    seconds = peaks.bound_s(work)
    rate = sum(num_reply for _, num_reply in jobs) / seconds
    report["bound"] = {
        "operations": work.operations,
        "bytes": work.num_bytes,
        "seconds": rounded(seconds),
        "output_tokens_per_s": rounded(rate),
    }
    report["penstock"]["share"] = rounded(seconds / report["penstock"]["seconds"])


def tables(result: Result) -> dict[str, list[str]]:
    """Return the paragraphs of each shape, by title."""
    parts = {}
    for name, found in result["shapes"].items():
        runs = {_contender(who, result): found[who] for who in ("penstock", "transformers") if who in found}
        head = ["", "output tokens/s (range)", "share of the bound", "ITL, median ms", "ITL, 99 % ms", "s"]
        head += ["first run: tokens/s, ITL, 99 % ms"]
        told = [f"{result['requests']} requests of ShareGPT's lengths, at most {result['rows']} at a time."]
        told += [f"Medians of {result['repeat']}. The bound is {figure(found['bound']['output_tokens_per_s'])} tokens/s."]
        if "times_transformers" in found:
            told += [f"**{figure(found['times_transformers'])} times transformers.**"]
        else:
            told += [f"Without transformers: {result['no_peer']}."]
        told_of = "; ".join(f"{who}: {run['attention']}" for who, run in runs.items())
        told += [f"Attention of {told_of}."]
        shares = ((who, run["share"]) for who, run in runs.items() if "share" in run)
        rows = [_row(who, run) for who, run in runs.items()]
        how = _contender("penstock", result).removeprefix("Penstock, ")
        parts[f"{name} like {found['like']}, {how}"] = [" ".join(told), *above_the_bound(shares), table(head, rows)]
    return parts


def _contender(who: str, result: Result) -> str:
    """Return the name with the formats that it computes with."""
    if who == "transformers":
        return "transformers, bf16"
    told = ["Penstock", result["format"], *(["int8 KV"] if result["kv_cache_dtype"] == "int8" else [])]
    return ", ".join([*told, *(["deterministic"] if result["deterministic"] else [])])


def _row(who: str, run: Result) -> list[str]:
    low, high = run["output_tokens_per_s_range"]
    return [
        who,
        f"{figure(run['output_tokens_per_s'])} ({figure(low)} to {figure(high)})",
        percent(run["share"]) if "share" in run else "",
        figure(run["itl_p50_ms"]),
        figure(run["itl_p99_ms"]),
        figure(run["seconds"]),
        f"{figure(run['first']['output_tokens_per_s'])}, {figure(run['first']['itl_p99_ms'])}",
    ]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "1.5b", "8b"])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rows", type=int, default=256, help="that run at a time")
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--format", choices=["bf16", "f8_e4m3", "q8_0", "q4_0"], default="bf16", help="of the weights")
    parser.add_argument("--kv-cache-dtype", choices=["bf16", "int8"], default="bf16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--attention", choices=["auto", "triton", "flashinfer"], default="auto", help="as the server's")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--self-test", action="store_true", help="a tiny shape, on any machine with torch and triton")
    args = parser.parse_args()
    args.device = "cuda"
    if args.self_test:
        args.shapes, args.requests, args.rows, args.step_tokens, args.repeat = ["tiny"], 6, 4, 32, 1
        args.no_peer = True
        args.device = use_interpreter()
    return args


def main() -> None:
    args = read_arguments()
    if not args.self_test:
        require_gpu()
    no_peer = "left out" if args.no_peer else why_no_peer()
    if no_peer is not None:
        print(f"transformers is not measured: {no_peer}")
    peaks = GpuPeaks(DeviceClock(args.device))
    report: dict[str, Any] = {"benchmark": "gpu_serve", **context(args.device, is_self_test=args.self_test)}
    report |= {"transformers": package_version("transformers"), "requests": args.requests, "rows": args.rows}
    report |= {"format": args.format, "kv_cache_dtype": args.kv_cache_dtype}
    report |= {"deterministic": args.deterministic, "repeat": args.repeat, "no_peer": no_peer}
    jobs = {name: make_jobs(SHAPES[name], args) for name in args.shapes}
    shapes = {name: compare(SHAPES[name], jobs[name], args, peaks, has_peer=no_peer is None) for name in args.shapes}
    for name, found in shapes.items():
        add_bound(found, SHAPES[name], jobs[name], args, peaks)
    report |= {"peaks": peaks.summary(), "shapes": shapes}
    show(report, tables)


if __name__ == "__main__":
    main()
