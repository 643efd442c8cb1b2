"""The comparison itself: rounds, failures, ratios; with records instead of servers."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import contenders
import peers
import pytest
from peer_setup import Environments
from peers import Round, compared, compete
from processes import Contender
from sessions import LoadError
from workloads import WORKLOADS

from penstock.lab.workload import Job


def one_round(rate, text="same"):
    return Round(ready_s=1.0, resident_mb=2.0, rates={8: rate}, in_all={8: 3 * rate}, starts=[text, "again"])


def rounds_of(*rates):
    return {turn: one_round(rate) for turn, rate in enumerate(rates)}


def make_setting(folder):
    job = Job(arrival_ns=0, num_prompt_tokens=300, num_output_tokens=200, prompt="a")
    return contenders.Setting(Environments(folder), folder / "m.gguf", contenders.MODELS["qwen"], {16: 24, 1: 8}, [job])


def test_rounds_alternate_and_every_second_goes_backwards():
    order = []

    def measure_one(contender, turn):
        order.append(contender.name)
        return one_round(1.0)

    compete([Contender(name, []) for name in "abc"], 3, measure_one)
    assert "".join(order) == "abccbaabc"


def test_no_answer_is_one_that_the_contender_gave_before(monkeypatch, tmp_path):
    asked: list[Job] = []

    class Session:
        ready_s = 1.0

        def replay(self, jobs, concurrency):
            asked.extend(jobs)
            return SimpleNamespace(records=[SimpleNamespace(num_output_tokens=2, text="a") for _ in jobs], duration_ns=1)

        def resident_mb(self):
            return 1.0

    monkeypatch.setattr(peers, "running", lambda contender, log: nullcontext(Session()))
    monkeypatch.setattr(peers, "warm_up", lambda session, jobs, concurrency: None)
    jobs = [Job(arrival_ns=0, num_prompt_tokens=3, num_output_tokens=2, prompt=str(idx)) for idx in range(7)]
    found = peers.measure(Contender("a", []), jobs, {2: 4, 1: 3}, tmp_path)
    assert asked == jobs
    assert len(found.starts) == 7


def test_contender_that_fails_is_left_out_and_the_others_go_on(capsys):
    def measure_one(contender, turn):
        if contender.name == "b" and turn == 1:
            raise LoadError("the stream broke off")
        if contender.name == "d":
            raise LoadError("no answer")
        return one_round(1.0)

    rounds = compete([Contender(name, []) for name in "abcd"], 3, measure_one)
    assert {name: list(found) for name, found in rounds.items()} == {"a": [0, 1, 2], "b": [0], "c": [0, 1, 2]}
    assert "b failed in round 2: the stream broke off" in capsys.readouterr().out


def test_medians_are_of_all_rounds_and_ratios_of_those_that_both_have():
    found = {"penstock": rounds_of(10, 40, 90), "peer": {0: one_round(10), 2: one_round(45, "sale")}, "late": {7: one_round(1)}}
    lines, ratios = compared(found, dict.fromkeys(found, 5.0), [8])
    assert lines.splitlines()[2:] == [
        "| penstock | 40 (10 to 90) | 120 | 1.00 | 2 | 5 |  |",
        "| peer | 28 (10 to 45) **1.50** | 82 | 1.00 | 2 | 5 | 4 |",  # (4 + 5 + 2 + 5) / 4 characters
        "| late | 1 (1 to 1) | 3 | 1.00 | 2 | 5 |  |",
    ]
    assert ratios == {"penstock": {}, "peer": {8: 1.5}, "late": {}}


def test_without_ours_there_are_no_ratios():
    lines, ratios = compared({"peer": rounds_of(1.0)}, {"peer": 5.0}, [8])
    assert "**" not in lines
    assert ratios == {"peer": {}}


@pytest.fixture
def driver(monkeypatch) -> Iterator[ModuleType]:
    """The driver of OpenVINO, without OpenVINO."""
    names = ("ContinuousBatchingPipeline", "GenerationConfig", "Tokenizer")
    monkeypatch.setitem(sys.modules, "openvino_genai", SimpleNamespace(**dict.fromkeys(names)))
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace())
    monkeypatch.syspath_prepend(Path(contenders.__file__).parent / "peers")
    yield import_module("drive_openvino")
    del sys.modules["drive_openvino"]


def test_properties_are_the_schedulers_where_it_knows_them_and_else_the_devices(driver):
    words = [
        "max_num_batched_tokens=256",
        "INFERENCE_NUM_THREADS=1",
        "ENABLE_CPU_PINNING=false",
        "INFERENCE_PRECISION_HINT=f32",
    ]
    scheduler = SimpleNamespace(max_num_batched_tokens=driver.MAX_BATCHED_TOKENS)
    of_device = driver.set_known(scheduler, driver.read_properties(words))
    assert scheduler == SimpleNamespace(max_num_batched_tokens=256)
    assert of_device == {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False, "INFERENCE_PRECISION_HINT": "f32"}


def test_a_peer_is_a_name_and_options_of_its_own(tmp_path, monkeypatch):
    """Each way to give them: on the command line, and in vLLM's environment."""
    setting = make_setting(tmp_path)
    for name in ("openvino", "vllm"):
        (tmp_path / name / "lib" / "python3" / "site-packages").mkdir(parents=True)
    for kind in ("bf16", "awq"):
        monkeypatch.setattr(contenders, f"make_{kind}_directory", lambda *_, kind=kind: tmp_path / kind)
    monkeypatch.setattr(Environments, "is_made", lambda *_: True)
    asked = [
        "penstock --kv-cache-dtype bf16",
        "openvino A=1 B=false",
        "vllm VLLM_CPU_NUM_OF_RESERVED_CPU=0 X=a=b",
        "vllm awq X=c",
    ]
    ours, openvino, vllm, awq = contenders.prepared(asked, setting, setup=False)
    assert [ours.name, openvino.name, vllm.name, awq.name] == asked
    assert list(ours.command)[-2:] == ["--kv-cache-dtype", "bf16"]
    assert list(openvino.command)[-3:] == ["16", "A=1", "B=false"]
    assert vllm.command[vllm.command.index("--max-model-len") + 1] == str(setting.max_tokens)
    assert (vllm.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"], vllm.environ["X"]) == ("0", "a=b")
    assert (tmp_path / "bf16" in vllm.command, tmp_path / "awq" in awq.command, awq.environ["X"]) == (True, True, "c")


def test_peer_that_is_not_there_is_left_out_with_the_remedy(tmp_path, capsys):
    ready = contenders.prepared(["penstock", "openvino", "nobody"], make_setting(tmp_path), setup=False)
    assert [contender.name for contender in ready] == ["penstock"]
    said = capsys.readouterr().out
    assert "make it with --setup" in said
    assert "nobody is left out: there are penstock, openvino, vllm, llamacpp" in said


def test_a_context_has_room_for_the_longest_job(tmp_path):
    assert make_setting(tmp_path).max_tokens == 512


def test_own_size_counts_the_package_and_what_it_needs():
    files = contenders.own_files()
    assert any("numpy" in str(path) for path in files)
    assert not any("pytest" in path.parts for path in files)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("model", contenders.MODELS.values(), ids=contenders.MODELS)
def test_no_load_has_fewer_requests_than_go_at_once(model, workload):
    assert all(count >= concurrency for concurrency, count in model.loads(workload).items())


def test_long_prompts_are_32_for_eight_clients_and_8_where_a_model_takes_long():
    assert [model.loads("long") for model in contenders.MODELS.values()] == [{8: 32}, {8: 8}]


def test_replies_are_compared_by_how_long_they_are_the_same():
    assert (peers.num_common("same", "sale"), peers.num_common("a", "ab"), peers.num_common("", "b")) == (2, 1, 0)
