"""The A/B test of a server: which settings may differ, who is in which arm, and what its recording says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import penstock.deploy.arms
from penstock.config import AbConfig, AdmissionConfig, BackendConfig, Config, KvConfig, SchedulerConfig, ServerConfig
from penstock.config.saved import write_config_file
from penstock.config.sources import all_settings
from penstock.deploy.arms import BY_REQUEST, Arms, read_arms, recorded_policies
from penstock.deploy.factory import start_model
from penstock.deploy.policies import build_policies
from penstock.lab.arms import compare_arms
from penstock.lab.recording import Arrival, AtDoor, open_recording
from penstock.models.catalog import ModelSource, SourceKind, resolve
from penstock.sched.policies.arms import ReserveByArm
from penstock.testing.builders import make_request
from penstock.types.errors import ConfigError
from penstock.types.request import ARM_A, ARM_B
from tiny_models import TinyLlama, write_gguf

USERS = [f"user-{number}" for number in range(4000)]


def config_of(folder: Path, settings: str, config: Config | None = None, **test: Any) -> Config:
    """A config with a test whose arm B has these settings."""
    path = folder / "b.toml"
    path.write_text(settings)
    return replace(config or Config(), ab=AbConfig(ab=str(path), **test))


def arms_of(folder: Path, settings: str = 'reserve = "predicted"\n', config: Config | None = None, **test: Any) -> Arms:
    arms = read_arms(config_of(folder, settings, config, **test))
    assert arms is not None
    return arms


def in_b(arms: Arms, **fields: str) -> set[str]:
    return {user for user in USERS if arms.arm_of(fields.get("tenant", ""), user) == ARM_B}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_is_kept(share: float, tmp_path: Path) -> None:
    found = len(in_b(arms_of(tmp_path, ab_share=share))) / len(USERS)
    assert found == pytest.approx(share, abs=4 * (share * (1 - share) / len(USERS)) ** 0.5)


def test_who_is_in_arm_b_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another request; and with the secret after a restart, and with a larger share."""
    arms = arms_of(tmp_path, ab_share=0.1, ab_secret="s")
    some = in_b(arms)
    assert some == in_b(arms)
    monkeypatch.setattr(penstock.deploy.arms, "_SECRET_OF_START", "another start")
    assert some == in_b(arms_of(tmp_path, ab_share=0.1, ab_secret="s"))
    assert some < in_b(arms_of(tmp_path, ab_share=0.3, ab_secret="s"))


def test_nobody_can_compute_an_arm_without_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and code are known to all: another secret, or start, draws anew."""
    found = [in_b(arms_of(tmp_path, ab_secret=secret)) for secret in ("s", "t", None)]
    monkeypatch.setattr(penstock.deploy.arms, "_SECRET_OF_START", "another start")
    found.append(in_b(arms_of(tmp_path)))
    for one, other in combinations(found, 2):
        assert len(one & other) / len(USERS) == pytest.approx(0.25, abs=0.04)


def test_models_of_one_server_draw_alike(tmp_path: Path) -> None:
    assert in_b(arms_of(tmp_path)) == in_b(arms_of(tmp_path))


def test_another_test_draws_anew(tmp_path: Path) -> None:
    one, other = in_b(arms_of(tmp_path)), in_b(arms_of(tmp_path, 'reserve = "prompt"\n'))
    assert len(one & other) / len(USERS) == pytest.approx(0.25, abs=0.04)


def test_users_of_two_tenants_are_drawn_apart(tmp_path: Path) -> None:
    arms = arms_of(tmp_path)
    both = in_b(arms, tenant="x") & in_b(arms, tenant="y")
    assert len(both) / len(USERS) == pytest.approx(0.25, abs=0.04)


def test_without_a_user_the_tenant_counts_and_without_both_the_request(tmp_path: Path) -> None:
    arms = arms_of(tmp_path)
    assert len({arms.arm_of("x", "") for _ in range(2000)}) == 1
    assert sum(arms.arm_of("", "") == ARM_B for _ in range(2000)) == pytest.approx(1000, abs=100)
    each = arms_of(tmp_path, ab_by="request")
    assert sum(each.arm_of("x", "someone") == ARM_B for _ in range(2000)) == pytest.approx(1000, abs=100)


def test_tenants_that_are_named_are_arm_b_alone(tmp_path: Path) -> None:
    arms = arms_of(tmp_path, ab_tenants=("x", "y"))
    assert [arms.arm_of(tenant, "anyone") for tenant in ("x", "y", "z", "")] == [ARM_B, ARM_B, ARM_A, ARM_A]


def test_no_test_is_no_arms() -> None:
    assert read_arms(Config()) is None


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ({"ab_share": 0.2}, "There is no arm B"),
        ({"ab_tenants": ("x",)}, "There is no arm B"),
    ],
)
def test_a_share_of_nothing_is_refused(test: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_arms(Config(ab=AbConfig(**test)))


def test_a_share_beside_tenants_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give one of them"):
        arms_of(tmp_path, ab_share=0.2, ab_tenants=("x",))


def test_equal_settings_are_no_test(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="arm B has the settings that the server has"):
        arms_of(tmp_path, 'batching = "dynamic"\n', Config(scheduler=SchedulerConfig(batching="dynamic")))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("max_num_seqs = 8", "max_num_seqs can't differ in arm B: it decides for steps"),
        ("max_num_batched_tokens = 64", "steps and memory that requests of both arms share"),
        ('budget = "decode-first"', "steps and memory"),
        ('slo_itl = "50ms"', "steps and memory"),
        ('victim = "latest"', "steps and memory"),
        ('preset = "vllm"', "it names policies for all requests"),
        ('kv_cache_memory = "1GiB"', "all requests share one KV cache"),
        ("prefix_caching = false", "all requests share one KV cache"),
        ("tenant_max_concurrent = 3", "it counts all calls of a tenant together"),
        ('device = "cpu"', "computed by one backend"),
        ('model = "another"', "answered by one model"),
        ("port = 1", "belongs to the server"),
        ("ab_share = 0.3", "it is the test itself"),
        ('policy = "priority"', "priority weighs requests of both arms"),
        ('policy = "fair"', "fair weighs requests of both arms"),
        ('policy = "./mine.py:Mine"', "mine.py:Mine weighs"),
    ],
)
def test_a_setting_for_all_requests_is_refused_with_a_remedy(line: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        arms_of(tmp_path, f"{line}\n")
    assert line.split(" ")[0] in raised.value.message
    assert str(tmp_path / "b.toml") in raised.value.message
    assert "another server" in raised.value.remedy
    assert "penstock bench compare" in raised.value.remedy


def test_an_order_of_arm_a_that_ranks_can_not_be_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fair weighs requests of both arms"):
        arms_of(tmp_path, 'policy = "sjf"\n', Config(scheduler=SchedulerConfig(policy="fair")))


def test_every_setting_by_request_is_a_setting() -> None:
    assert {item.key for item in all_settings()} >= BY_REQUEST


def test_a_file_of_settings_is_used_as_it_is(tmp_path: Path) -> None:
    """Settings that are equal to the server's own may stand there."""
    config = Config(scheduler=SchedulerConfig(max_num_seqs=16), admission=AdmissionConfig(slo_ttft_s=2.0))
    text = '# written by hand\nmax_num_seqs = 16\nslo_ttft = "500ms"\nqueue_timeout = "3s"\nkv_watermark = "5%"\n'
    arms = arms_of(tmp_path, text, config)
    assert arms.differences == {"slo_ttft": (2.0, 0.5), "queue_timeout": (None, 3.0), "kv_watermark": (None, 0.05)}
    assert arms.b.scheduler == config.scheduler
    assert arms.words.startswith("0.5 of the users are arm B: ")
    assert "slo_ttft = 0.5 (A: 2.0)" in arms.words


def test_a_file_of_tune_is_used_as_it_is(tmp_path: Path) -> None:
    served = SchedulerConfig(max_num_seqs=16)
    tuned = Config(scheduler=replace(served, reserve="predicted", policy="sjf", policy_args={"max_delay_ns": 5}))
    arms = arms_of(tmp_path, write_config_file(tuned, ["found by a search"]), Config(scheduler=served))
    assert arms.differences.keys() == {"reserve", "policy", "policy_args"}
    assert arms.b.scheduler == tuned.scheduler
    other = Config(scheduler=replace(tuned.scheduler, max_num_batched_tokens=64))
    with pytest.raises(ConfigError, match="max_num_batched_tokens can't differ in arm B"):
        arms_of(tmp_path, write_config_file(other, []), Config(scheduler=served))


def test_another_reserve_does_not_take_over_the_settings_of_the_first(tmp_path: Path) -> None:
    config = Config(kv=KvConfig(kv_watermark=0.3))
    arms = arms_of(tmp_path, 'reserve = "prompt"\n', config)
    assert arms.b.kv.kv_watermark is None
    assert isinstance(arms.policies(config).reserve, ReserveByArm)


def test_a_recording_of_arm_b_makes_arm_b(tmp_path: Path) -> None:
    """Its arguments are those of arm A, so that they are no difference, and its order is another."""
    config = Config(scheduler=SchedulerConfig(policy="sjf", policy_args={"max_delay_ns": 5}))
    arms = arms_of(tmp_path, 'policy = "srpf"\npolicy_args = {max_delay_ns = 5}\n', config)
    assert arms.differences == {"policy": ("sjf", "srpf")}
    made = recorded_policies({"policy": "sjf", "policy_args": {"max_delay_ns": 5}}, {"differences": arms.differences})
    assert made.words == arms.policies(config).words
    assert "arm B: srpf (max_delay_ns = 5)" in made.words["order"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reserve =", "is not TOML"),
        ('reserv = "prompt"', "unknown key 'reserv'"),
        ('reserve = "mine"', "not available"),
        ('reserve = "prompt"\nkv_watermark = 0.5', r"b\.toml: The reserve 'prompt' has no --kv-watermark"),
    ],
)
def test_a_broken_file_is_told_by_its_name(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        arms_of(tmp_path, text)
    assert "b.toml" in raised.value.message


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama())


SMALL = Config(
    backend=BackendConfig(backend="native", threads=1),
    kv=KvConfig(kv_cache_memory_bytes=1 << 18),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
)


def test_a_test_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = config_of(tmp_path, "max_num_seqs = 2\n", SMALL)
    with pytest.raises(ConfigError, match="max_num_seqs can't differ"):
        start_model(config, ModelSource(name="none", kind=SourceKind.GGUF, path=tmp_path / "missing.gguf"))


def test_a_recording_has_the_arms_and_its_plans_are_made_again(gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    settings = 'reserve = "no-evict"\npolicy = "sjf"\nlength_predictor = "none"\nslo_ttft = "5s"\n'
    config = config_of(tmp_path, settings, replace(SMALL, server=ServerConfig(record=str(path))))
    running = start_model(config, resolve(str(gguf), gguf.parent))
    assert running.arms is not None

    async def ask(number: int) -> None:
        prompt = [20 + (number * 7 + pos) % 40 for pos in range(4 + number * 13 % 30)]
        request = make_request(f"r{number}", prompt, max_tokens=4 + number * 5 % 17)
        request.arm = "AB"[number % 2]
        request.arrival_ns = running.clock.now_ns()
        with running.bridge.open([request]) as stream:
            while not stream.is_ended:
                await stream.next_chunks()

    async def everything() -> None:
        await asyncio.gather(*map(ask, range(24)))

    asyncio.run(everything())
    running.on_refused("x", ARM_B, "queue_delay")
    running.close(10)
    recording = open_recording(path)
    header = recording.header
    assert header.arms is not None
    assert header.arms["differences"]["slo_ttft"] == (None, 5.0)
    assert "b.toml" not in path.read_text()
    arrivals = [event for event in recording.events() if isinstance(event, Arrival)]
    assert sorted(arrival.arm for arrival in arrivals) == ["A"] * 12 + ["B"] * 12
    [refused] = [event for event in recording.events() if isinstance(event, AtDoor)]
    assert (refused.arm, refused.tenant, refused.reject_reason) == ("B", "1", "queue_delay")
    compared = compare_arms(recording)
    assert [len(arm.records) for arm in compared.arms] == [12, 13]
    assert {one.end: one.counts for one in compared.ends} == {"answered": (12, 12), "refused": (0, 1)}


def test_without_a_test_policies_and_recording_are_what_they_were(gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    running = start_model(replace(SMALL, server=ServerConfig(record=str(path))), resolve(str(gguf), gguf.parent))
    running.on_refused("x", "", "queue_full")
    running.close(10)
    recording = open_recording(path)
    assert recording.header.arms is None
    assert "arm" not in recording.header.about
    assert not [event for event in recording.events() if isinstance(event, AtDoor)]
    assert recorded_policies(recording.header.settings, None).words == build_policies(SMALL).words
