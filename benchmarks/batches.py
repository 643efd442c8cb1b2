"""Do batches of many lines keep their promises: one answer per line, little memory, and a rate that delays nobody?

    python benchmarks/batches.py kills --lines 100000 --kills 10
    python benchmarks/batches.py kills --lines 2000 --kills 10 --model smollm2:135m
    python benchmarks/batches.py full --lines 20000 --disk-mib 16
    python benchmarks/batches.py many --lines 10000000
    python benchmarks/batches.py beside --lines 1000000

- `kills`: a server over a fake executor is killed (SIGKILL) at random moments and restarted; counts each line's answers.
  With `--model`, that model's answers are compared with those of an uninterrupted batch of the same lines.
- `full`: the same on a disk (a tmpfs, which only root can mount) that fills up before the end and grows after the one kill.
- `many`: upload, check and bookkeeping of a file without a server: lines per second, and peak memory of the process.
- `beside`: time of short requests, alone and while a file is checked, with steps of 5 ms.

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

TESTS = Path(__file__).parents[1] / "tests"
URL = "/v1/completions"
BODY = {"model": "toy", "max_tokens": 1}
TURNED_AWAY = (httpx.TransportError,)
ENDED = ("completed", "failed", "expired", "cancelled")
WRITTEN_TOGETHER = 1000
"""Answers of a fifth of a second, at 5000 lines per second."""


def lines(num: int, body: dict[str, Any]) -> Iterator[bytes]:
    """Yield lines of some 240 bytes, with a thousand different beginnings."""
    for nth in range(num):
        prompt = f"You are helper {nth * 7919 % 1000:04d}, and you answer in one word whatever you are asked. Question {nth}"
        told = {"custom_id": f"request-{nth}", "method": "POST", "url": URL, "body": body | {"prompt": prompt}}
        yield json.dumps(told).encode() + b"\n"


def write_lines(path: Path, num: int, body: dict[str, Any] = BODY) -> None:
    with path.open("wb") as file:
        file.writelines(lines(num, body))


def serve(folder: str, port: int, step_s: float) -> None:
    """Serve the hash executor, and jobs in a folder, until this process is killed."""
    sys.path.insert(0, str(TESTS))
    from penstock.config import ServerConfig
    from penstock.serve.server import run_server
    from penstock.testing import HashExecutor
    from support.deployments import deployment_of
    from support.server.harness import CAPACITY, PRINTABLE_MODEL, make_runtime

    class SlowExecutor(HashExecutor):
        def collect(self, ticket: Any) -> Any:
            time.sleep(step_s)
            return super().collect(ticket)

    executor = (SlowExecutor if step_s else HashExecutor)(CAPACITY, model=PRINTABLE_MODEL)
    run_server(deployment_of(make_runtime(executor)), ServerConfig(port=port, jobs_dir=folder, shutdown_timeout_s=0.0))


class Server:
    """A server as a process of its own."""

    def __init__(self, folder: Path, step_s: float = 0.0, model: str | None = None) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.command = [sys.executable, __file__, "serve", str(folder), str(port), str(step_s)]
        self.body = BODY
        if model:
            options = ["--port", str(port), "--jobs-dir", str(folder)]
            self.command = [sys.executable, "-m", "penstock", "serve", model, *options]
            self.body = {"model": model, "max_tokens": 32, "temperature": 0}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        while True:
            try:
                self.http.get("/health")
                return
            except TURNED_AWAY:
                assert self.process.poll() is None, "the server did not start"
                time.sleep(0.05)

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait()

    def asked(self, method: str, path: str, **fields: Any) -> Any:
        answer = self.http.request(method, path, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def begin(self, num: int, scratch: Path) -> str:
        """Upload lines, and begin a batch of them. Return its id."""
        path = scratch / "in.jsonl"
        write_lines(path, num, self.body)
        with path.open("rb") as file:
            uploaded = self.asked("POST", "/v1/files", files={"file": file}, data={"purpose": "batch"})
        path.unlink()
        wanted = {"input_file_id": uploaded["id"], "endpoint": URL, "completion_window": "24h"}
        return self.asked("POST", "/v1/batches", json=wanted)["id"]

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.asked("GET", f"/v1/batches/{batch_id}")

    def ended(self, batch_id: str) -> dict[str, Any]:
        while (batch := self.batch(batch_id))["status"] not in ENDED:
            time.sleep(0.2)
        return batch

    def answers(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            with self.http.stream("GET", f"/v1/files/{file_id}/content") as answer:
                yield from map(json.loads, answer.iter_lines())

    def counted(self, batch: dict[str, Any]) -> Counter[str]:
        """Count each line's answers."""
        return Counter(answer["custom_id"] for answer in self.answers(batch))

    def choices(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {answer["custom_id"]: answer["response"]["body"]["choices"] for answer in self.answers(batch)}


def verdict(server: Server, batch: dict[str, Any], num: int) -> dict[str, Any]:
    counted = server.counted(batch)
    return {
        "status": batch["status"],
        "lines": num,
        "answered": len(counted),
        "missing": num - len(counted),
        "answered_twice": sum(times > 1 for times in counted.values()),
        "counts": batch["request_counts"],
    }


def kills(num: int, num_kills: int, seed: int, model: str | None) -> dict[str, Any]:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        server, begin_s = Server(Path(folder) / "jobs", model=model), time.perf_counter()
        batch_id = server.begin(num, Path(folder))
        killed_at = []
        for threshold in [0, *sorted(chance.randrange(num * 19 // 20) for _ in range(num_kills - 1))]:  # 0: during the check
            while server.batch(batch_id)["request_counts"]["completed"] < threshold:
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 0.4))
            found = server.batch(batch_id)
            killed_at.append([found["status"], found["request_counts"]["completed"]])
            server.end(signal.SIGKILL)
            server.start()
        batch = server.ended(batch_id)
        seconds = time.perf_counter() - begin_s
        found = verdict(server, batch, num)
        if model:
            again = server.choices(server.ended(server.begin(num, Path(folder))))
            found["differ"] = sum(again[name] != choices for name, choices in server.choices(batch).items())
        server.end(signal.SIGTERM)
        names = sorted(path.name for path in (Path(folder) / "jobs").iterdir())
        left = [path.name for path in (Path(folder) / "jobs" / "lines").iterdir()]
        return {**found, "seconds": round(seconds, 1), "killed_at": killed_at, "in_folder": names, "lines_left": left}


def full(num: int, disk_mib: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_mib}m", "tmpfs", folder], check=True)
        try:
            server = Server(Path(folder))
            batch_id = server.begin(num, Path(scratch))
            before, since_s = -1, time.perf_counter()
            while time.perf_counter() - since_s < 20:  # until nothing goes on
                now = server.batch(batch_id)["request_counts"]["completed"]
                if now != before:
                    before, since_s = now, time.perf_counter()
                time.sleep(0.2)
            stats = os.statvfs(folder)
            free_kib = stats.f_bavail * stats.f_frsize // 1024
            asked = server.asked("POST", URL, json=BODY | {"prompt": "hello"})["choices"][0]["finish_reason"]
            refused = server.http.post("/v1/files", files={"file": b"x" * (1 << 20)}, data={"purpose": "batch"}).status_code
            server.end(signal.SIGKILL)
            subprocess.run(["mount", "-o", f"remount,size={disk_mib * 16}m", folder], check=True)
            server.start()
            found = verdict(server, server.ended(batch_id), num)
            server.end(signal.SIGTERM)
            when = {"answered_when_full": before, "free_kib_when_full": free_kib}
            return {**found, **when, "request_when_full": asked, "upload_when_full": refused}
        finally:
            subprocess.run(["umount", folder], check=True)


def many(num: int) -> dict[str, Any]:
    from penstock.jobs.lines import Answer, Lines, prepare
    from penstock.jobs.store import UPLOAD, Store
    from penstock.serve.jobs.form import Form

    found: dict[str, Any] = {"lines": num}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        result = work()
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        found[name] = {
            "seconds": round(seconds, 1),
            "cpu_s": round(cpu_s, 1),
            "lines_per_s": int(num / seconds),
            "lines_per_cpu_s": int(num / cpu_s),
            "peak_mib": peak_mib,
        }
        print(name, found[name], flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        store, source = Store(Path(folder) / "jobs", max_bytes=1 << 40), Path(folder) / "in.jsonl"
        subprocess.run([sys.executable, __file__, "write", str(source), str(num)], check=True)
        found["input_bytes"] = source.stat().st_size

        def upload() -> Path:
            form = Form("multipart/form-data; boundary=XyZ")
            form.feed(b'--XyZ\r\nContent-Disposition: form-data; name="file"; filename="in"\r\n\r\n')
            with closing(store.upload(("", ""))) as writing, source.open("rb") as file:
                while data := file.read(1 << 20):
                    writing.write(form.feed(data))
                writing.write(form.feed(b"\r\n--XyZ--\r\n"))
                return store.content(writing.keep("in", UPLOAD, 0).id)

        content = timed("upload", upload)
        source.unlink()
        base, output, errors = (Path(folder) / name for name in ("base", "output", "errors"))
        timed("check_and_order", lambda: prepare(base, content, (URL,), 1 << 22, lambda: False))
        found["database_bytes"] = base.stat().st_size
        lines = Lines(base, content, output, errors)
        told = (
            b'{"id":"batch_req_batch_0123456789abcdef-1","custom_id":"request-123","response":{"body":{}}}'.ljust(500) + b"\n"
        )

        def keep_books() -> None:
            after, answers = 0, list[Answer]()
            while taken := lines.take_to_ask(after, 16, 1 << 20):
                after = taken[-1].place
                answers += [Answer(one.place, told, is_error=False, usage={"input_tokens": 20}) for one in taken]
                if len(answers) >= WRITTEN_TOGETHER:
                    lines.write(answers)
                    answers = []
            lines.write(answers)

        timed("bookkeeping", keep_books)
        assert lines.progress.num_completed == num
        lines.close()
        found["output_bytes"] = output.stat().st_size
        store.close()
    return found


def beside(num: int, num_requests: int) -> dict[str, Any]:
    def times_ms(server: Server, num: int) -> list[float]:
        found = []
        for _ in range(num):
            begin_s = time.perf_counter()
            server.asked("POST", URL, json={"model": "toy", "max_tokens": 8, "prompt": "hello"})
            found.append(1000 * (time.perf_counter() - begin_s))
        return found

    def told(found: list[float]) -> dict[str, float]:
        cuts = statistics.quantiles(found, n=100)
        return {
            "p50_ms": round(cuts[49], 1),
            "p90_ms": round(cuts[89], 1),
            "p99_ms": round(cuts[98], 1),
            "requests": len(found),
        }

    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "jobs", step_s=0.005)
        times_ms(server, 20)
        alone = times_ms(server, num_requests)
        batch_id, during, begin_s = server.begin(num, Path(folder)), list[float](), time.perf_counter()
        while server.batch(batch_id)["status"] == "validating":
            during += times_ms(server, 1)
        check_s = time.perf_counter() - begin_s
        server.end(signal.SIGKILL)
    return {"lines": num, "check_s": round(check_s, 1), "alone": told(alone), "during_the_check": told(during)}


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
        return
    if sys.argv[1:2] == ["write"]:
        write_lines(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["kills", "full", "many", "beside"])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--model", help="of `kills`: MODEL of penstock serve")
    parser.add_argument("--disk-mib", type=int, default=16)
    parser.add_argument("--requests", type=int, default=100, help="measured alone")
    args = parser.parse_args()
    found = {
        "kills": lambda: kills(args.lines, args.kills, args.seed, args.model),
        "full": lambda: full(args.lines, args.disk_mib),
        "many": lambda: many(args.lines),
        "beside": lambda: beside(args.lines, args.requests),
    }[args.question]()
    print(json.dumps({"question": args.question} | found))


if __name__ == "__main__":
    main()
