"""`penstock simulate`: settings and workloads as they are served, side by side; errors in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.bench import load_tokenizer_of
from penstock.cli.main import main
from penstock.config.components import BackendConfig, Config, KvConfig, ModelConfig, SchedulerConfig, config_from
from penstock.deploy.forecast import kv_bytes_per_token, simulated, simulation_of
from penstock.deploy.policies import admission_limits, choose_policies
from penstock.lab.cost_model import CostModel
from penstock.types.errors import ConfigError, ModelError, NotEnoughMemory
from penstock.types.plan import Capacity

Simulate = Callable[..., str]
SMALL = ("--blocks", "400", "--workload", "short", "--requests", "40", "--rate", "20")


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Runs the command; gives what it prints, or its error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *words])
        out, err = capsys.readouterr()
        return out if ended.value.code == 0 else err

    return run


def test_the_settings_are_those_that_would_serve() -> None:
    config = config_from({"policy": "sjf", "max_num_seqs": 9, "max_queue": 5, "slo_ttft": 2.0, "prefix_sharing": "tenant"})
    settings = simulation_of(config, CostModel(), num_blocks=100)
    assert settings.capacity == Capacity(101, 16, 9, 512, 1600)
    assert settings.make_policies().words == choose_policies(config).make().words
    assert settings.make_policies() is not settings.make_policies()
    assert settings.limits == admission_limits(config.admission)
    assert settings.isolates_tenants
    assert settings.depth == 1


def test_with_a_model_the_memory_is_as_large_as_the_servers(tiny_model: Path) -> None:
    config = config_from({"model": str(tiny_model), "kv_cache_memory": 1 << 20})
    capacity = simulation_of(config, CostModel()).capacity
    block_bytes = capacity.block_size * kv_bytes_per_token(config)
    assert capacity.num_blocks == (1 << 20) // block_bytes
    assert capacity.max_model_len == 512
    with pytest.raises(NotEnoughMemory, match="kv_cache_memory"):
        simulation_of(config_from({"model": str(tiny_model), "kv_cache_memory": 1 << 50}), CostModel())


def test_a_models_table_sets_what_is_simulated(simulate: Simulate) -> None:
    Path("p.toml").write_text(
        '[[models]]\nmodel = "smollm2:135m"\nserved_model_name = "small"\nmax_num_seqs = 2\nreplicas = 3\n'
        '[[models]]\nmodel = "other"\nmax_num_seqs = 4\n'
    )
    for words, rows, num_replicas in (
        (("small",), ["2"], 3),
        (("small", "--router", "prefix"), ["2"], 3),
        (("small", "--replicas", "2", "--max-num-seqs", "7"), ["7"], 2),
        (("small", "--vary", "max_num_seqs=5,6"), ["5", "6"], 6),
        (("--vary", "model=small,other"), ["2", "4"], 3),
        ((), ["64"], 1),
    ):
        out = simulate(*SMALL, "--config", "p.toml", *words)
        assert re.findall(r"server has (\d+) rows", out) == rows, out
        assert len(re.findall(r"replica \d  ", out)) == num_replicas, out
    assert "are not read, and smal has no table [[models]]." in simulate(*SMALL, "--config", "p.toml", "smal")


def test_replicas_scale_as_those_of_a_clusters_file(simulate: Simulate) -> None:
    Path("p.toml").write_text(
        'replicas = 0\nmax_replicas = 4\n[[models]]\nmodel = "one.gguf"\nreplicas = 1\n'
        '[[models]]\nmodel = "two.gguf"\nmax_replicas = 2\n'
    )
    for words, shown in (
        ((), ["0..4"]),
        (("one.gguf",), ["1..4"]),
        (("two.gguf",), ["0..2"]),
        (("--replicas", "2"), ["2"]),
        (("--vary", "replicas=3,1..2"), []),
    ):
        out = " ".join(simulate(*SMALL, "--config", "p.toml", *words).split())
        assert re.findall(r"\breplicas = ([\d.]*\d)", out) == shown, out
        assert ("replica-hours" in out) == (shown != ["2"]), out
    Path("p.toml").write_text("max_replicas = 1\n")
    assert "replicas is 2, and max_replicas 1." in simulate(*SMALL, "--config", "p.toml")


def test_a_report_has_the_settings_of_a_models_table(simulate: Simulate) -> None:
    Path("p.toml").write_text(
        'max_num_seqs = 4\npolicy = "edf"\n[policy_args]\nmax_slack_ns = 5\n'
        '[[models]]\nmodel = "a.gguf"\nserved_model_name = "small"\nmax_num_seqs = 2\npolicy = "fcfs"\n'
    )
    out = " ".join(simulate(*SMALL, "small", "--config", "p.toml").split())
    assert re.findall(r"\bmodel\w* = [\w.]+", out) == ["model = a.gguf"]
    assert "max_num_seqs = 2" in out
    assert "policy = fcfs" in out
    assert "policy_args" not in out
    compared = ("--vary", "model=small,other", "--vary", "rate=20,30")
    out = " ".join(simulate(*SMALL, "small", "--config", "p.toml", *compared).split())
    assert re.findall(r"Options of (.*?): [^.]*max_num_seqs = (\d)", out) == [
        ("small, 20; small, 30", "2"),
        ("other, 20; other, 30", "4"),
    ]
    assert not re.search(r"\brate = |\bmodel\w* = ", out), "in the names of the runs"


def test_keys_of_the_server_keep_prefixes_apart(simulate: Simulate) -> None:
    workload = ("--blocks", "400", "--workload", "chat", "--requests", "40", "--tenants", "4", "--prefix-tokens", "512")
    workload = (*workload, "--prefix-groups", "1", "--max-input-tokens", "700", "--max-output-tokens", "60")
    apart = simulate(*workload, "--prefix-sharing", "tenant")
    Path("p.toml").write_text('api_key = ["one-secret", "two-secret"]\n')
    out = simulate(*workload, "--kv-eviction", "lru", "--config", "p.toml")
    [share] = re.findall(r"([\d.]+) % of them from the prefix cache", out)
    assert f"{share} % of them from" in apart
    assert f"{share} % of them from" not in simulate(*workload)
    with_file = simulate(*workload, "--kv-eviction", "lru", "--api-key-file", "/run/secrets/not-here")
    assert f"{share} % of them from" in with_file
    assert "secret" not in out


@pytest.mark.parametrize("words", [("plan",), ("tune", "--slo", "ttft=1s")], ids="-".join)
def test_plans_keep_prefixes_apart_as_the_server_does(
    words: tuple[str, ...], simulate: Simulate, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def stop(*about: Any) -> None:
        made.append(simulated(*about))
        raise ConfigError("stop")

    monkeypatch.setattr("penstock.deploy.forecast.simulated", stop)
    Path("p.toml").write_text('api_key = ["one", "two"]\n')
    asked = (*words, str(tiny_model), "--hardware", "L4", "--requests", "216", "--input-tokens", "9", "--config", "p.toml")
    with pytest.raises(SystemExit):
        main(list(asked))
    assert [one.isolates_tenants for one in made] == [True]


def test_experts_on_disk_are_refused_where_that_changes_nothing(tiny_model: Path) -> None:
    config = config_from({"model": str(tiny_model), "experts_on_disk": True})
    with pytest.raises(ConfigError, match="is not a mixture of experts"):
        simulation_of(config, CostModel())
    with pytest.raises(ConfigError, match="--blocks says how large"):
        simulation_of(config, CostModel(), num_blocks=100)


@pytest.mark.parametrize(
    ("cost", "asked", "longest"),
    [(CostModel(), None, 8192), (CostModel(step_ns=1.0), None, 16000), (CostModel(step_ns=1.0), 9000, 9000)],
)
def test_without_a_model_the_blocks_limit_the_context(cost: CostModel, asked: int | None, longest: int) -> None:
    config = Config(model=ModelConfig(max_model_len=asked))
    assert simulation_of(config, cost, num_blocks=1000).capacity.max_model_len == longest


def test_texts_are_counted_by_the_models_tokenizer(simulate: Simulate, tiny_model: Path) -> None:
    text = "天空为什么是蓝色的"
    Path("w.jsonl").write_text(json.dumps({"prompt": text, "max_tokens": 3}))
    num_tokens = len(load_tokenizer_of(str(tiny_model), None).encode(text, add_special_tokens=False))
    assert num_tokens > 9
    assert f"\n{num_tokens} prompt tokens" in simulate(str(tiny_model), "--workload", "w.jsonl")
    assert "\n2 prompt tokens" in simulate("--blocks", "99", "--workload", "w.jsonl"), "estimated"


def test_a_gpu_has_its_own_defaults() -> None:
    config = Config(backend=BackendConfig(device="cuda"))
    settings = simulation_of(config, CostModel(), num_blocks=1000)
    assert (settings.capacity.max_rows, settings.capacity.max_step_tokens, settings.depth) == (256, 2048, 2)


@pytest.mark.parametrize(
    ("config", "num_blocks", "says"),
    [
        (Config(kv=KvConfig(kv_disk_size_bytes=1 << 30)), 100, "A tier below the KV cache is not simulated"),
        (Config(kv=KvConfig(kv_cache_memory_bytes=1 << 30)), 100, "--blocks and --kv-cache-memory both say"),
        (Config(backend=BackendConfig(device="cuda")), None, "is measured when a server starts"),
        (Config(backend=BackendConfig(steps_in_flight=2)), 100, "--steps-in-flight has no meaning on the CPU"),
        (Config(scheduler=SchedulerConfig(preset="static", max_batch_size=2000)), 100, "--max-batch-size to 32 or less"),
    ],
)
def test_what_is_not_simulated_is_refused(config: Config, num_blocks: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulation_of(config, CostModel(), num_blocks=num_blocks)


def test_a_model_that_is_not_here_is_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"penstock pull .* Or leave out the model, and set --blocks"):
        simulation_of(config_from({"cache": str(tmp_path)}), CostModel())


def test_it_says_the_figures_and_how_fast_it_was(simulate: Simulate) -> None:
    out = simulate(*SMALL, "--slo", "ttft=1s")
    assert "Simulated: an estimate, not a measurement." in out
    assert "40 requests in" in out
    assert "cost model: the default, of SmolLM2-135M" in out
    assert "A server has 64 rows, 400 KV blocks of 16 tokens" in out.replace("\n  ", " ")
    assert re.search(r"^TTFT ms +\d", out, re.MULTILINE)
    assert re.search(r"s were simulated in [\d.]+ s of one core, [\d,]+ times real time: [\d,]+ steps", out)
    assert "OUTSIDE" not in out


def test_it_repeats(simulate: Simulate, tmp_path: Path) -> None:
    for name in ("a", "b"):
        simulate(*SMALL, "--json", f"{name}.json")
    first, second = (json.loads((tmp_path / f"{name}.json").read_text())["runs"] for name in ("a", "b"))
    assert first[0]["requests"] == second[0]["requests"]
    assert first[0]["how"] == "simulated"


def test_guesses_are_made_if_it_is_said_how_many_hold(simulate: Simulate) -> None:
    note = "No tokens were guessed, which a server would do"
    assert note in simulate(*SMALL)
    assert note not in simulate(*SMALL, "--speculation", "off")
    out = simulate(*SMALL, "--acceptance", "0.9")
    assert note not in out
    assert re.search(r"[\d,]+ guesses, [5-9]\d\.\d% of them right\.", out)
    useless = "--acceptance has no effect: this server does not guess tokens."
    assert useless not in out
    out = simulate(*SMALL, "--acceptance", "0.9", "--speculation", "off", "--vary", "policy=fcfs,sjf")
    assert out.count(useless) == 1
    out = simulate(*SMALL, "--acceptance", "0.9", "--vary", "speculation=off,suffix")
    assert f"speculation=off: {useless}" in out
    assert out.count(useless) == 1
    assert "Set it from 0 to 1" in simulate(*SMALL, "--acceptance", "2")
    assert "can't be read" in simulate(*SMALL, "--acceptance", "no.rec")
    assert "Leave out --speculation-model" in simulate(*SMALL, "--speculation-model", "small.gguf")


def test_a_guesser_of_ones_own_is_refused(simulate: Simulate, tmp_path: Path) -> None:
    """Its figures would be those of the acceptance."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from penstock.sched.policies.base import Guesser\n"
        "class Mine(Guesser):\n"
        "    def guess(self, request, most):\n"
        "        raise NotImplementedError\n"
    )
    for words in (("--speculation", f"{path}:Mine"), ("--vary", f"speculation=suffix,{path}:Mine")):
        out = simulate(*SMALL, "--acceptance", "0.9", *words)
        assert f"The guesser '{path}:Mine' is not simulated" in out


def test_settings_are_compared_side_by_side(simulate: Simulate) -> None:
    out = simulate(*SMALL, "--vary", "policy=fcfs,sjf", "--vary", "max-num-seqs=2,4")
    names = [f"{policy}, {rows}" for policy in ("fcfs", "sjf") for rows in (2, 4)]
    table = out.split("Simulation")[0]
    assert [line[: len(name)] for name in names for line in table.splitlines() if line.startswith(f"{name} ")] == names
    assert "TTFT ms" not in out, "the figures of each are shown with --every-run"


def test_requests_are_matched_only_with_the_same_requests(simulate: Simulate) -> None:
    matched = re.compile(r"of \d+ requests get their first or last token at another time")
    assert matched.search(simulate(*SMALL, "--vary", "max-num-seqs=1,2"))
    for varied in ("requests=20,40", "rate=20,40", "seed=1,2"):
        out = simulate(*SMALL, "--vary", varied)
        assert "s were simulated in" in out
        assert not matched.search(out)


def test_loads_are_shares_of_what_the_first_can_serve(simulate: Simulate, tmp_path: Path) -> None:
    words = ("--blocks", "400", "--workload", "short", "--requests", "60", "--vary", "load=0.5,1", "--json", "r.json")
    assert "load=0.5" in simulate(*words)
    slow, fast = (run["load"]["value"] for run in json.loads((tmp_path / "r.json").read_text())["runs"])
    assert fast == pytest.approx(2 * slow, rel=1e-3)


@pytest.mark.parametrize("kind", [("--cv", "4"), ("--burst-s", "1", "2"), ("--arrivals", "poisson")])
def test_a_load_can_have_any_kind_of_arrivals(simulate: Simulate, kind: tuple[str, ...]) -> None:
    out = simulate("--blocks", "400", "--workload", "short", "--requests", "30", "--load", "0.5", *kind)
    assert "30 requests in" in out


@pytest.mark.parametrize(
    "other",
    [("--speed", "2"), ("--stages", "2x60"), ("--arrivals", "closed"), ("--concurrency", "4"), ("--rate-to", "40")],
)
def test_nothing_else_sets_the_rate_of_a_load(simulate: Simulate, other: tuple[str, ...]) -> None:
    out = simulate("--blocks", "400", "--workload", "short", "--load", "0.5", *other)
    assert f"--load and {other[0]}" in out
    assert "both say when requests come" in out


@pytest.mark.parametrize("users", [("--concurrency", "4"), ("--vary", "concurrency=2,4")])
def test_users_who_set_when_requests_come_have_no_rate(simulate: Simulate, users: tuple[str, ...]) -> None:
    assert "--concurrency is a closed loop" in simulate(*SMALL, *users)


def test_a_run_has_the_rate_that_arrives(simulate: Simulate, tmp_path: Path) -> None:
    simulate(*SMALL, "--rate-to", "40", "--speed", "0.5", "--json", "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["runs"][0]["load"] == {"kind": "rate", "value": 15}
    simulate(*SMALL, "--rate", "0.00001", "--speed", "0.7", "--json", "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["runs"][0]["load"] == {"kind": "rate", "value": 7e-6}


def test_options_of_several_values_are_shown_without_brackets(simulate: Simulate) -> None:
    out = simulate(*SMALL, "--slo", "ttft=1s", "--slo", "e2e=9s", "--vary", "policy=fcfs,sjf", "--replicas", "1..2")
    assert "slo = ttft=1s e2e=9s, vary = policy=fcfs,sjf, replicas = 1..2." in " ".join(out.split())
    out = simulate(*SMALL[:-2], "--stages", "20x1,5x10")
    assert "stages = 20.0x1.0 5.0x10.0." in " ".join(out.split())


def test_a_policy_is_compared_with_the_default(simulate: Simulate, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from penstock.sched.policies.base import Order\n\n\n"
        "class LongFirst(Order):\n"
        "    def __init__(self, *, weight: int = 1):\n        self.weight = weight\n\n"
        "    def key(self, request, now_ns):\n        return (-self.weight * request.num_prompt_tokens,)\n"
    )
    lengths = ("--input-tokens", "300~1.5", "--output-tokens", "40~0.8")
    words = ("--blocks", "400", *lengths, "--requests", "60", "--max-num-seqs", "2", "--load", "1")
    own = ("--policy", "./mine.py:LongFirst", "--policy-args", "{weight = 2}")
    out = simulate(*words, *own, "--without", "policy")
    assert re.search(r"[1-9]\d* of 60 requests get their first or last token at another time", out)
    assert re.search(r"^as given ", out, re.MULTILINE)
    assert re.search(r"^without policy ", out, re.MULTILINE)
    assert re.search(r"^0 of 60 requests get", simulate(*words, "--policy", "fcfs", "--without", "policy"), re.MULTILINE)


def test_an_option_without_a_default_is_compared_with_its_absence(simulate: Simulate) -> None:
    out = simulate(*SMALL, "--max-tokens", "2", "--without", "max-tokens")
    assert re.search(r"[1-9]\d* of 40 requests get their first or last token at another time", out)


def test_of_many_replicas_three_are_shown(simulate: Simulate) -> None:
    out = simulate(*SMALL, "--replicas", "40", "--router", "prefix")
    shown = [line.split("  ")[0].partition(": ")[2] for line in out.splitlines() if line.startswith("replica ")]
    assert shown == ["least busy of 40", "in the middle of 40", "busiest of 40"]


def test_replicas_are_shown_apart(simulate: Simulate) -> None:
    out = simulate(*SMALL, "--replicas", "2", "--router", "prefix")
    assert re.search(r"^replica 0 .*\nreplica 1 ", out, re.MULTILINE)
    out = simulate(*SMALL, "--prefill-replicas", "1", "--kv-bytes-per-token", "20000")
    assert re.search(r"^prefill 0 .*\ndecode 0 ", out, re.MULTILINE)


def test_an_option_can_be_varied_with_its_dashes(simulate: Simulate) -> None:
    out = simulate(*SMALL, "--vary", "--replicas=1,2", "--router", "least-work")
    assert re.search(r"^replicas=2, replica 1 ", out, re.MULTILINE)


def test_an_option_is_compared_by_its_flag_or_its_name_in_results(simulate: Simulate, tmp_path: Path) -> None:
    words = (*SMALL, "--sessions", "2", "--json", "r.json")
    simulate(*words, "--vary", "think-time=0,5")
    simulate(*words, "--vary", "think_time_s=0,5", "--json", "n.json")
    simulate(*words, "--think-time", "5", "--without", "think-time", "--json", "w.json")
    for file, thinks in {"r.json": [False, True], "n.json": [False, True], "w.json": [True, False]}.items():
        runs = json.loads((tmp_path / file).read_text())["runs"]
        assert ["think" in run["workload"] for run in runs] == thinks


def test_blocks_are_compared_with_those_of_the_model(simulate: Simulate, tiny_model: Path) -> None:
    words = ("--max-model-len", "512", "--kv-cache-dtype", "bf16", "--without", "--blocks")
    out = simulate(str(tiny_model), *SMALL, *words)
    assert len(re.findall(r"[\d,]+ KV blocks of 16 tokens", out)) == 2


def test_seeds_are_repeats(simulate: Simulate, tmp_path: Path) -> None:
    out = simulate(*SMALL, "--vary", "policy=fcfs,sjf", "--vary", "seed=1,2,3", "--json", "r.json")
    assert re.search(r"^policy=sjf, seed 3 ", out, re.MULTILINE)
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [(run["name"], run["seed"]) for run in runs] == [
        (f"policy={name}", n) for name in ("fcfs", "sjf") for n in (1, 2, 3)
    ]
    out = simulate(*SMALL, "--vary", "--seed=1,2", "--json", "r.json")
    assert re.findall(r"^seed [12] ", out, re.MULTILINE) == ["seed 1 ", "seed 2 "]
    assert [run["name"] for run in json.loads((tmp_path / "r.json").read_text())["runs"]] == ["", ""]


def test_replicas_that_scale_are_reported(simulate: Simulate) -> None:
    out = simulate(*SMALL, "--replicas", "0..3", "--start-s", "2")
    assert re.search(r"^0\.\d\d replica-hours. Replicas: \d.\d\d in the mean, 1 at most, 1 change\.$", out, re.MULTILINE)
    both = simulate(*SMALL, "--vary", "replicas=2,1..3")
    assert re.search(r"^replicas=1\.\.3: 0\.\d\d replica-hours", both, re.MULTILINE)
    assert re.search(r"^replicas=2, replica 1 ", both, re.MULTILINE)


def test_the_price_is_of_one_replica(simulate: Simulate, tmp_path: Path) -> None:
    split = ("--prefill-replicas", "1", "--kv-bytes-per-token", "20000")
    for replicas in (("3",), ("2", *split), ("0..3", "--start-s", "2")):
        simulate(*SMALL, "--price-per-hour", "0.5", "--json", "r.json", "--replicas", *replicas)
        price = json.loads((tmp_path / "r.json").read_text())["runs"][0]["price_per_hour"]
        assert price == 1.5 if replicas[0] != "0..3" else 0 < price < 1.5


def test_admission_is_the_servers(simulate: Simulate) -> None:
    words = ("--blocks", "400", "--workload", "short", "--requests", "60", "--rate", "500", "--max-num-seqs", "2")
    assert "429 queue_full" in simulate(*words, "--max-queue", "3")
    assert "60 requests in" in (calm := simulate(*words))
    assert "429" not in calm
    assert ": 60 ok." in simulate(*words, "--max-queue", "3", "--returns", "1000")


def test_without_one_success_the_exit_code_is_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *SMALL, "--max-model-len", "16", "--json", "r.json"])
    assert ended.value.code == 1
    assert json.loads((tmp_path / "r.json").read_text())["runs"]


def test_files_are_written(simulate: Simulate, tmp_path: Path) -> None:
    simulate(*SMALL, "--html", "out.html")
    page = (tmp_path / "out.html").read_text()
    assert "Simulated: an estimate" in page
    assert "KV held" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--vary", "policy"), "'policy' does not vary a setting"),
        (("--vary", "polices=a"), "polices is not an option to compare"),
        (("--vary", "policy=fcfs,best"), "'best' is not available"),
        (("--vary", "policy=sjf", "--vary", "policy=fcfs"), "policy is varied twice"),
        (("--vary", "policy=sjf", "--without", "policy"), "both say what is compared"),
        (("--vary", f"seed={','.join(map(str, range(300)))}"), "asks for 300 combinations"),
        (("--load", "0.5"), "--load and --rate both say when requests come"),
        (("--device", "cuda"), "The default cost model is of a CPU"),
        (("absent/model",), "With --blocks the model's files are not read"),
        (("absent/model", "--vary", "blocks=200,400"), "With --blocks the model's files are not read"),
        (
            ("absent/model", "--replicas", "2", "--link-gbytes-per-s", "1", "--kv-bytes-per-token", "24576"),
            "With --blocks the model's files are not read",
        ),
        (("--replicas", "2", "--router", "nearest"), "There is no router 'nearest'"),
        (("--cost", "nowhere.json"), "nowhere.json"),
        (("--vary", "html=a,b"), "html is not an option to compare"),
        (("--vary", "route=a,b"), "route is not an option to compare"),
        (("--vary", "embed-ms=1,2"), "embed_ms is not an option to compare"),
        (("--replicas", "2", "--vary", "link-latency-ms=1,50"), "--link-latency-ms has no effect without a link"),
        (("--vary", "link-gbytes-per-s=1,10"), "--link-gbytes-per-s has no effect with one server"),
        (("--router", "prefix"), "no effect with one server"),
        (("--kv-cache-dtype", "int8"), "Leave one of them out; --blocks may be as many as fit"),
        (("--vary", "kv-cache-dtype=int8,bf16"), "--kv-cache-dtype has no effect with --blocks"),
        (("--vary", "kv-cache-dtype=int8,bf16", "--vary", "blocks=9"), "--kv-cache-dtype has no effect with --blocks"),
        (("--replicas", "6..1"), "'6..1' is neither a number from 1 to 1024 nor a range such as 1..6"),
        (("--replicas", "0"), "'0' is neither a number"),
        (("--replicas", "1..6", "--prefill-replicas", "1", "--kv-bytes-per-token", "20000"), "Prefill replicas don't scale"),
        (("--replicas", "2", "--start-s", "3"), "--start-s has no effect with a fixed number of replicas"),
        (("--link-latency-ms", "3"), "--link-latency-ms has no effect without a link"),
        (("--replicas", "2", "--kv-bytes-per-token", "3"), "--kv-bytes-per-token has no effect without a link"),
        (("--price-per-hour", "nan"), "nan is not a finite number"),
        (("--price-per-hour", "-1"), "-1.0 is not in the range"),
        (("--replicas", "1..2", "--start-s", "inf"), "inf is not in the range"),
        (("--replicas", "2", "--link-gbytes-per-s", "1", "--link-latency-ms", "nan"), "nan is not a finite number"),
        (("--link-gbytes-per-s", "3"), "--link-gbytes-per-s has no effect with one server"),
        (("--background-share", "0.1"), "No such option '--background-share'"),
        (("--vary", "background-share=0,0.1"), "background_share is not an option to compare"),
    ],
)
def test_errors_are_said_in_words(simulate: Simulate, words: tuple[str, ...], says: str) -> None:
    assert says in simulate(*SMALL, *words)


def test_a_load_needs_a_request_that_fits(simulate: Simulate) -> None:
    out = simulate("--blocks", "8", "--workload", "documents", "--requests", "5", "--load", "0.9")
    assert "The servers refuse every request of this workload (context_length)." in out
