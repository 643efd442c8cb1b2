"""`penstock plan`: from a workload to a size, with errors that help."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.backends import native
from penstock.cli.candidates import find_machines, make_candidate, read_model
from penstock.cli.plan import plan
from penstock.config.components import config_from
from penstock.deploy.forecast import kv_bytes_per_token
from penstock.lab import hardware
from penstock.lab.cost_files import SavedCost, save_cost
from penstock.lab.cost_model import CostModel, Fitted
from penstock.lab.fitting import Errors
from penstock.lab.plan import Sized
from penstock.lab.plan import plan as size_deployment
from penstock.machine import cpu_name
from penstock.models.cache import default_cache_dir
from penstock.types.errors import ConfigError

Penstock = Callable[..., subprocess.CompletedProcess[str]]

Briefly = Callable[..., Result]

SHORT = ("--requests", "30", "--input-tokens", "20-60", "--output-tokens", "5-9")


@pytest.fixture
def briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probed_once: None) -> Briefly:
    """Runs `penstock plan ARGUMENTS` in this process. Workloads are hardly repeated, which would take most of the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, most in {"MOST_REQUESTS": 1, "MOST_TOKENS": 1000, "MOST_FLEET_TOKENS": 1000, "_FILLS": 2}.items():
        monkeypatch.setattr(f"penstock.lab.plan.{name}", most)
    return lambda *arguments: CliRunner().invoke(plan, [*map(str, arguments)])


def test_a_plan_for_another_machine_is_the_same_each_time(briefly: Briefly, tiny_model: Path, tmp_path: Path) -> None:
    arguments = (tiny_model, *SHORT, "--slo", "ttft=1s", "--slo", "tpot=50ms", "--hardware", "L4", "--json", "plan.json")
    first = briefly(*arguments)
    assert first.exit_code == 0, first.output
    numbers = json.loads((tmp_path / "plan.json").read_text())
    assert numbers["machines"][0]["highest_rate"] > 0
    for words in ("KV per token", "Highest rate:", "replica", "estimates from peaks", "yours will differ"):
        assert words in first.stdout, words
    assert briefly(*arguments).stdout == first.stdout
    assert json.loads((tmp_path / "plan.json").read_text()) == numbers


def test_on_a_terminal_the_machine_is_named_before_it_is_planned_for(
    briefly: Briefly, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "planning for" not in briefly(tiny_model, *SHORT, "--hardware", "L4").stderr
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True)
    assert briefly(tiny_model, *SHORT, "--hardware", "L4").stderr == "planning for L4 ...\n"


def test_machines_are_compared_and_those_that_do_not_fit_are_left_out(
    briefly: Briefly, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "small.csv").write_text(
        "name,kind,description,memory_gb,read_gb_s,int8_tops,bf16_tops,read_share,compute_share,step_us,basis,"
        "price_per_hour_usd,price_source,price_date,spec_source\n"
        "toy,cpu,a toy,1.1,1,0.1,0.1,1,1,0,measured by nobody,0.01,https://example.org,2026-11,https://example.org\n"
    )
    asked = ("--hardware", "c7a.4xlarge,H100,toy", "--hardware-table", "small.csv")
    result = briefly(tiny_model, *SHORT, "--slo", "e2e=5s", *asked)
    assert result.exit_code == 0, result.output
    table = result.stdout[: result.stdout.index("Highest rate")]
    assert table.split()[0] == "hardware", "the comparison comes first"
    assert table.index("c7a.4xlarge") < table.index("H100"), "the cheaper one comes first"
    assert "toy: left out. " in result.stderr


def test_no_machine_that_is_left_is_an_error(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("plan", tiny_model, "--input-tokens", "9000", "--hardware", "L4,H100")
    assert result.returncode == 1
    assert "L4: left out. " in result.stderr
    assert "No machine is left" in result.stderr
    assert "left out" not in result.stdout


def test_this_machine_is_probed_and_without_slos_there_is_arithmetic(briefly: Briefly, tiny_model: Path) -> None:
    result = briefly(tiny_model, *SHORT)
    assert result.exit_code == 0, result.output
    assert "on this: " in result.stdout
    assert "rows at the knee" in result.stdout
    assert "give SLOs: --slo" in result.stdout


def test_settings_of_the_server_change_the_plan(briefly: Briefly, tiny_model: Path, tmp_path: Path) -> None:
    rates = []
    for flags in ((), ("--max-num-seqs", "4")):
        result = briefly(tiny_model, *SHORT, "--slo", "ttft=20ms", "--hardware", "L4", "--json", "plan.json", *flags)
        assert result.exit_code == 0, result.output
        rates.append(json.loads((tmp_path / "plan.json").read_text())["machines"][0]["highest_rate"])
    assert rates[1] < rates[0]


def test_the_fleet_is_for_the_rate_that_arrives(briefly: Briefly, tiny_model: Path) -> None:
    """A ramp from 2 to 20 per second has a mean of 11, and twice the speed doubles it."""
    words = ("--rate", "2", "--rate-to", "20", "--speed", "2", "--slo", "ttft=1s", "--hardware", "L4")
    result = briefly(tiny_model, *SHORT, *words)
    assert result.exit_code == 0, result.output
    assert "\nFor 22 requests/s: " in result.stdout
    assert re.search(r"with the options of this workload and --speed \S+ in place of --speed 2$", result.stdout, re.MULTILINE)


def test_it_says_that_a_rate_replaces_the_arrivals_of_a_file(briefly: Briefly, tiny_model: Path, tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:15:{second:02d},30,6\n" for second in range(20))
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello", "max_tokens": 6}\n' * 20)
    for file, arrivals, says in (
        ("azure.csv", (), False),
        ("azure.csv", ("--rate", "2"), True),
        ("azure.csv", ("--rate", "2", "--arrivals", "poisson"), False),
        ("prompts.jsonl", ("--rate", "2"), False),
    ):
        result = briefly(tiny_model, "--workload", file, "--hardware", "L4", *arrivals)
        assert result.exit_code == 0, result.output
        assert ("--rate replaces the arrivals of a file" in result.stdout) == says


def test_a_candidate_has_the_settings_of_the_server(tiny_model: Path) -> None:
    config = config_from({"model": str(tiny_model), "slo_itl": 0.05, "prefix_sharing": "tenant"})
    about = (read_model(config, is_gpu=True), find_machines("L4", None)[0], None)
    simulation = make_candidate(config, *about, seed=7).simulation
    assert (simulation.slo_itl_ns, simulation.isolates_tenants, simulation.depth) == (50_000_000, True, 2)
    assert simulation.seed == 7
    assert (simulation.limits, simulation.max_tokens) == (None, None), "a plan looks for the rate that needs no limits"
    with pytest.raises(ConfigError, match="--max-batch-size to 128 or less"):
        make_candidate(config_from({"model": str(tiny_model), "preset": "static", "max_batch_size": 2000}), *about)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("is_gpu", [True, False])
def test_the_arithmetic_has_the_kv_bytes_of_the_backend(tiny_model: Path, dtype: str, is_gpu: bool) -> None:
    config = config_from({"model": str(tiny_model), "kv_cache_dtype": dtype, "device": "cuda" if is_gpu else "cpu"})
    machine = find_machines("L4" if is_gpu else "c7a.4xlarge", None)[0]
    size = make_candidate(config, read_model(config, is_gpu=is_gpu), machine, None).size
    assert size.kv_bytes_per_token == size.kv_read_bytes == kv_bytes_per_token(config)


def test_right_guesses_meet_a_latency_that_no_single_step_meets(briefly: Briefly, tiny_model: Path, tmp_path: Path) -> None:
    save_cost(tmp_path / "cost.json", SavedCost(cost=CostModel(), source="profile"))
    answers = ("--requests", "30", "--input-tokens", "20", "--output-tokens", "9", "--slo", "tpot=2.5ms", "--goal", "90%")
    rates = []
    for flags in ((), ("--acceptance", "1")):
        result = briefly(tiny_model, *answers, "--cost", "cost.json", "--json", "plan.json", *flags)
        assert result.exit_code == 0, result.output
        assert ("No guesses of tokens" in result.stdout) == (not flags)
        rates.append(json.loads((tmp_path / "plan.json").read_text())["machines"][0]["highest_rate"])
    assert not rates[0]
    assert rates[1] > 0
    result = briefly(tiny_model, *answers, "--acceptance", "1", "--speculation", "off", "--hardware", "L4")
    assert "--acceptance has no effect: this server does not guess tokens." in result.stdout


def test_fitted_step_times_go_before_an_estimate_and_know_their_range(
    briefly: Briefly, tiny_model: Path, tmp_path: Path
) -> None:
    fitted = Fitted(max_rows=2, max_decodes=2, max_prefill_tokens=512, max_context_len=512)
    saved = SavedCost(cost=CostModel(fitted=fitted), source="profile", model="another-model", date="2026-11-22")
    save_cost(tmp_path / "cost.json", saved)
    result = briefly(tiny_model, *SHORT, "--slo", "ttft=1s", "--cost", "cost.json")
    assert result.exit_code == 0, result.output
    assert "by the fitted model" in result.stdout
    assert "estimates from peaks" not in result.stdout
    assert "The step times are those of another-model, not of tiny." in result.stdout
    assert "lie outside of the range that the cost model was fitted to" in result.stdout


def test_texts_are_counted_by_the_models_tokenizer(briefly: Briefly, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "天空为什么是蓝色的", "max_tokens": 6}\n' * 20)
    result = briefly(tiny_model, "--workload", "prompts.jsonl", "--rate", "2", "--hardware", "L4")
    assert result.exit_code == 0, result.output
    assert "estimated at 4 characters" not in result.stdout


def test_step_times_of_this_machine_are_not_taken_for_another(briefly: Briefly, tiny_model: Path, tmp_path: Path) -> None:
    saved = SavedCost(cost=CostModel(), source="profile", machine={"cpu": cpu_name()})
    save_cost(tmp_path / "cost.json", saved)
    result = briefly(tiny_model, *SHORT, "--cost", "cost.json", "--hardware", "c7i.4xlarge")
    assert isinstance(result.exception, ConfigError)
    assert "cost.json has the step times of this machine, and c7i.4xlarge is another one" in str(result.exception)
    assert briefly(tiny_model, *SHORT, "--cost", "cost.json").exit_code == 0


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"machine": {"cpu": "NVIDIA H100 80GB HBM3"}}, "The step times are those of NVIDIA H100 80GB HBM3, not of "),
        ({"machine": {"cpu": cpu_name(), "threads": 999}}, "The step times are those of 999 threads, not of "),
        (
            {"source": "kernels", "notes": {"weights": "fp8_static", "kv": "bfloat16"}},
            "those of fp8_static weights and bfloat16 keys and values",
        ),
    ],
    ids=["a GPU's", "other threads'", "other weights'"],
)
def test_step_times_of_another_server_are_doubted(
    about: dict[str, Any], words: str, briefly: Briefly, tiny_model: Path, tmp_path: Path
) -> None:
    save_cost(tmp_path / "cost.json", SavedCost(cost=CostModel(), **{"source": "profile"} | about))
    result = briefly(tiny_model, *SHORT, "--cost", "cost.json", "--json", "plan.json")
    assert result.exit_code == 0, result.output
    assert words in result.stdout
    [one] = json.loads((tmp_path / "plan.json").read_text())["machines"]
    assert one["step_error"] == (1.5 if "machine" in about else 1.1)


def test_threads_of_the_server_are_those_of_this_machine(
    briefly: Briefly, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a GPU nor another machine's step times have to do with them."""
    probe, asked = native.probe_peaks, []
    monkeypatch.setattr(native, "probe_peaks", lambda threads, variant: asked.append(threads) or probe(threads, variant))
    (tmp_path / "p.toml").write_text("threads = 1\n")
    for name, cpu, threads in (("here", cpu_name(), 1), ("there", "another", 9)):
        saved = SavedCost(cost=CostModel(), source="profile", machine={"cpu": cpu, "threads": threads})
        save_cost(tmp_path / f"{name}.json", saved)
    costs = ("--hardware", "this,c7i.4xlarge,L4", "--cost", "this=here.json,c7i.4xlarge=there.json", "--beside", "vllm")
    result = briefly(tiny_model, *SHORT, "--config", "p.toml", *costs, "--slo", "ttft=1s")
    assert result.exit_code == 0, result.output
    assert asked == [1]
    assert "The step times are those of" not in result.stdout
    assert "left out" not in result.stderr
    result = briefly(tiny_model, *SHORT, "--threads", "1", "--hardware", "L4")
    assert "--threads is of this machine" in str(result.exception)


def test_words_of_a_table_are_not_taken_for_names(briefly: Briefly, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "cost.csv").write_text("# hardware: My Xeon\n# weights: bf16\ncost,ns\nstep_ns,1000000\n")
    result = briefly(tiny_model, *SHORT, "--cost", "cost.csv")
    assert result.exit_code == 0, result.output
    assert "The step times are those of" not in result.stdout


def test_each_machine_has_step_times_of_its_own_source_with_their_error(
    briefly: Briefly, tiny_model: Path, tmp_path: Path
) -> None:
    fast = CostModel(step_ns=1e6, decode_row_ns=1e4, prefill_token_ns=1e4)
    missed = {"execute": Errors(median=0.1, p90=0.25, largest=0.5, signed_mean=0.0, num=9)}
    machine = {"cpu": "2 NVIDIA RTX PRO 6000 Blackwell Server Edition", "gpus": 2}
    save_cost(tmp_path / "kernels.json", SavedCost(cost=fast, source="kernels", machine=machine, model="someone/tiny"))
    save_cost(tmp_path / "fit.json", SavedCost(cost=fast, source="profile", machine={"cpu": "NVIDIA L4"}, errors=missed))
    costs = (
        "--cost",
        "RTXPRO6000=kernels.json,L4=fit.json,L40S=fit.json",
        "--hardware",
        "rtxpro6000,L4,L40S,H100",
        "--json",
        "plan.json",
    )
    result = briefly(tiny_model, *SHORT, "--slo", "e2e=5s", *costs)
    assert result.exit_code == 0, result.output
    machines = {one["hardware"]: one for one in json.loads((tmp_path / "plan.json").read_text())["machines"]}
    assert {name: one["step_error"] for name, one in machines.items()} == {
        "RTXPRO6000": 1.1,
        "L4": 1.25,
        "L40S": 1.5,
        "H100": 1.5,
    }
    for name, kind in {"RTXPRO6000": "measured kernels", "L4": "fitted", "H100": "estimated from peaks"}.items():
        assert re.search(rf"^  {name} .* {kind}$", result.stdout, re.MULTILINE), name
        assert machines[name]["highest_rates"][0] < machines[name]["highest_rates"][1]
    assert "The step times are those of NVIDIA L4, not of L40S." in result.stdout
    assert "of 2 GPUs that share each layer: the memory and the price of RTXPRO6000 must be those of all" in result.stdout
    assert result.stdout.count("The step times are those of") == 2
    twice = briefly(tiny_model, *SHORT, "--cost", "L4=fit.json,l4=kernels.json", "--hardware", "L4")
    assert "--cost names two files for L4" in str(twice.exception)


def test_a_preset_is_planned_beside_these_settings(briefly: Briefly, tiny_model: Path) -> None:
    server = ("--slo", "ttft=20ms", "--hardware", "L4", "--router", "prefix", "--policy", "sjf", "--slo-itl", "20ms")
    result = briefly(tiny_model, *SHORT, *server, "--beside", "vllm", "--beside", "orca")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()[1:4]]
    assert [row[:4] for row in rows] == [
        ["L4", "these", "settings", "prefix"],
        ["L4", "preset", "vllm", "round-robin"],
        ["L4", "preset", "orca", "round-robin"],
    ]
    assert "x" in rows[2]


def test_a_machine_of_ones_own_replaces_one_whose_name_differs_in_case(tmp_path: Path) -> None:
    lines = (Path(hardware.__file__).parent / "hardware.csv").read_text().splitlines()
    header, h100 = (next(line for line in lines if line.startswith(name)) for name in ("name,", "H100,"))
    (tmp_path / "own.csv").write_text(f"{header}\n{h100.replace('H100', 'h100', 1).replace(',80,', ',94,', 1)}\n")
    [found] = find_machines("H100", tmp_path / "own.csv")
    assert (found.name, found.memory_bytes) == ("h100", 94_000_000_000)


def test_a_preset_that_cannot_be_planned_leaves_the_machine_in(
    briefly: Briefly, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*about: Any, is_brief: bool = False) -> Sized:
        if is_brief:
            raise ConfigError("It does not fit.", remedy="Take less.")
        return size_deployment(*about)

    monkeypatch.setattr("penstock.lab.plan.plan", refuse)
    result = briefly(tiny_model, *SHORT, "--slo", "e2e=5s", "--hardware", "L4", "--beside", "vllm")
    assert result.exit_code == 0, result.output
    assert "L4, preset vllm: left out. It does not fit." in result.stderr
    assert "Highest rate: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (("--slo", "speed=3"), "not a known latency"),
        (("--slo", "ttft=1"), "not a time with a unit"),
        (("--goal", "much"), "--goal"),
        (("--hardware", "H300"), "There is no hardware called 'H300'"),
        (("--kv-disk-size", "1GiB", "--hardware", "c7i.4xlarge"), "not simulated"),
        (("--hardware", " , "), "names no hardware"),
        (("--background-share", "0.1"), "No such option '--background-share'"),
        (("--hardware-table", "absent.csv"), "can't be read as a table"),
        (("--workload", "absent.csv", "--hardware", "L4"), "absent.csv"),
        (("--cost", "absent.json", "--hardware", "L4"), "absent.json"),
        (("--cost", "absent.json", "--hardware", "L4,H100"), "--cost L4=absent.json; the others are estimated"),
        (("--cost", "H200=absent.json", "--hardware", "L4,H100"), "'H200=absent.json' is not a file for one of L4, H100"),
        (("--beside", "vllm", "--hardware", "L4"), "--beside compares highest rates"),
        (("--beside", "vlm", "--slo", "e2e=9s", "--hardware", "L4"), "'vlm' is not available; available: static"),
        ((*SHORT, "--json", "absent/plan.json", "--hardware", "L4"), "can't be written"),
        (("--input-tokens", "9000", "--hardware", "L4"), "this server takes 512"),
        (("--router", "fastest", "--hardware", "L4"), "There is no router 'fastest'"),
        (("--price-per-hour", "1", "--hardware", "L4,H100"), "--price-per-hour is of one machine, and --hardware names 2"),
        (("--headroom", "100%", "--hardware", "L4", "--slo", "e2e=9s"), "headroom"),
    ],
)
def test_mistakes_are_named(penstock_here: Penstock, tiny_model: Path, arguments: tuple[str, ...], cause: str) -> None:
    result = penstock_here("plan", tiny_model, *arguments)
    assert result.returncode in (1, 2)
    assert cause in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_that_is_not_here_is_not_fetched(penstock: Penstock) -> None:
    result = penstock("plan", "--hardware", "L4")
    assert result.returncode == 1
    assert "penstock pull smollm2:135m" in result.stderr


def test_the_table_of_hardware_is_listed(penstock: Penstock) -> None:
    result = penstock("plan", "--hardware", "list")
    assert result.returncode == 0
    assert re.search(r"RTXPRO6000 .* LLMServingSim, AIConfigurator ", result.stdout)


def example_of_the_page() -> tuple[list[str], str]:
    """The words after `penstock`, and what the page shows below them."""
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- begin example -->\n```console\n\$ penstock (.*?)\n(.*?)```\n<!-- end example -->", page, re.DOTALL)
    assert found is not None
    return shlex.split(found[1]), without_workload(found[2])


def without_workload(text: str) -> str:
    return re.sub(r"^Workload .*\n", "", text, flags=re.MULTILINE)


def in_line(text: str) -> str:
    return re.sub(r" {2,}", "  ", text)


def after(shown: str, printed: str) -> str:
    """Return what is printed after the lines that are shown, where `...` stands for any lines."""
    for part in re.split(r"^ +\.\.\.\n", shown, flags=re.MULTILINE):
        assert part in printed, "its lines stand together, and after those before"
        printed = printed.partition(part)[2]
    return printed


@pytest.mark.model
def test_the_default_model_has_the_arithmetic_that_the_page_shows(penstock: Penstock) -> None:
    words, shown = example_of_the_page()
    while "--slo" in words:
        begin = words.index("--slo")
        del words[begin : begin + 2]
    result = penstock(*words, "--cache", default_cache_dir())
    assert result.returncode == 0, result.stderr
    head, answered, _ = shown.partition("\nHighest rate: ")
    _, is_there, arithmetic = shown.partition("\nArithmetic\n")
    assert answered
    assert is_there
    printed = after(head, without_workload(result.stdout))
    rest = after(is_there + in_line(arithmetic), in_line(printed))  # with SLOs the names are padded for a longer one
    assert rest.strip().startswith("For the highest rate, replicas and cost, give SLOs")


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_is_planned_as_its_page_shows(penstock: Penstock) -> None:
    words, shown = example_of_the_page()
    result = penstock(*words, "--cache", default_cache_dir())
    assert result.returncode == 0, result.stderr
    assert not after(shown, without_workload(result.stdout)).strip()
