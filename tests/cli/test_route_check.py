"""`penstock route check`: what a configuration's routes need and would do, without serving; faults with cause and remedy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import main
from penstock.cli.route import digest
from penstock.models import load
from penstock.routes.learned import SHARES, Cascade, Fit, LearnedRoute
from support.tiny_models import TinyLlama, write_gguf

MODELS = """
[[models]]
model = "small.gguf"
[[models]]
model = "large.gguf"
[[models]]
model = "vectors.gguf"
task = "embed"
pooling = "mean"
"""
LEARNED = """
[[routes]]
name = "auto"
weak = "small"
strong = "large"
file = "route.json"
share = 0.5
"""
FAR = """
[[routes]]
name = "far-first"
fallback = ["cloud", "small"]
[[upstreams]]
name = "cloud"
url = "http://localhost:9/v1"
key_env = "CLOUD_KEY"
never_matching = ["(?i)secret"]
"""
WIDTH = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("small", "large", "vectors")):
        write_gguf(folder / f"{name}.gguf", TinyLlama(hidden_size=WIDTH, seed=seed))
    return folder


@pytest.fixture
def check(
    capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Runs the command on a config file's text; gives the lines that it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOUD_KEY", "sk-never-shown")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    write_route(tmp_path)

    def run(text: str, *words: str, code: int = 0) -> list[str]:
        (tmp_path / "penstock.toml").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["route", "check", "--config", "penstock.toml", *words])
        out, err = capsys.readouterr()
        assert ended.value.code == code, out + err
        assert "sk-never-shown" not in out + err
        return (out + err).splitlines()

    return run


def write_route(folder: Path, width: int = WIDTH, margin: float = 0.1) -> None:
    """Digits make a question hard for the small model."""
    fits = []
    for extras in (2, 5):
        weak = np.zeros(width + extras + 1)
        weak[width + 1] = -2.0
        fits.append(Fit(np.zeros(extras), np.ones(extras), weak, np.zeros(width + extras + 1)))
    digests = {name: digest(str(folder / f"{name}.gguf")) for name in ("small", "vectors")}
    route = LearnedRoute(
        embedder="vectors",
        by_question=fits[0],
        cascade=Cascade("small", 4, margin, fits[1]),
        thresholds=(0.25,) * len(SHARES),
        digests=digests,
    )
    route.write(folder / "route.json")


def test_it_says_what_each_route_has_and_does(check: Callable[..., list[str]]) -> None:
    facts = dict(line.split("  ", 1) for line in check(MODELS + LEARNED + FAR))
    assert all("of weights" in facts[f"model {name}"] for name in ("small", "large"))
    assert facts["route auto"].strip() == (
        "large from a gain of 0.250 on (share 0.5), else small, which begins 4 tokens if those can change that"
    )
    assert facts["upstream cloud"].strip() == "http://localhost:9/v1, with a key"
    assert facts["route far-first"].strip() == "cloud, then small"


@pytest.mark.parametrize(
    ("question", "auto", "far_first"),
    [
        ("What is red?", "small; gain=0.000; threshold=0.250", "cloud, then small"),
        ("What is 12345 * 6789?", "large; gain=0.490; threshold=0.250", "cloud, then small"),
        ("My secret is 12345", "large; gain=0.473; threshold=0.250", "small; cloud must not see it"),
    ],
)
def test_it_says_who_would_answer_a_question(question: str, auto: str, far_first: str, check: Callable[..., list[str]]) -> None:
    lines = check(MODELS + LEARNED + FAR, "--question", question)
    assert [line.split("  ", 1)[1].strip() for line in lines[-2:]] == [auto, far_first]


def test_where_first_tokens_decide_the_small_model_begins(check: Callable[..., list[str]], tmp_path: Path) -> None:
    write_route(tmp_path, margin=0.5)
    lines = check(MODELS + LEARNED, "--question", "What is red?")
    assert lines[-1].split("  ")[-1].startswith("small begins, and its first tokens decide; gain=0.000;")


def test_all_faults_are_told_at_once(check: Callable[..., list[str]], tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", TinyLlama(hidden_size=WIDTH, seed=9))
    write_route_of_others = LEARNED.replace('"auto"', '"other"').replace('"route.json"', '"lost.json"')
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    more = '[[routes]]\nname = "either"\nfallback = ["missing", "small", "vectors", "broken"]\n'
    lines = check(
        MODELS + '[[models]]\nmodel = "broken.gguf"\n' + LEARNED + write_route_of_others + more,
        "--question",
        "What is red?",
        code=1,
    )
    faults = [line for line in lines if line.startswith("error: ")]
    for cause in (
        "lost.json can't be read",
        "The route either needs 'missing', which is not served. Name it beside",
        "vectors is to answer or to judge, and writes no text. Name another",
        "The route auto was fitted with another small than small is here: their files differ. Fit it anew",
        "broken.gguf",
    ):
        assert len([fault for fault in faults if cause in fault]) == 1, (cause, faults)
    assert len(faults) == 5
    assert not any(line.startswith("by ") for line in lines)


def test_files_that_can_not_be_compared_are_no_fault_of_the_route(
    check: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: Path, **_: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(load, "fingerprint", unreadable)
    assert not [line for line in check(MODELS + LEARNED) if line.startswith("error: ")]


def test_vectors_of_another_length_are_a_fault(check: Callable[..., list[str]], tmp_path: Path) -> None:
    write_route(tmp_path, width=32)
    [fault] = [line for line in check(MODELS + LEARNED, code=1) if line.startswith("error: ")]
    assert "A route needs vectors of 32 numbers from vectors, and its vectors have 64." in fault


def test_a_model_that_is_not_here_is_named_with_its_command(check: Callable[..., list[str]]) -> None:
    route = '[[routes]]\nname = "either"\nfallback = ["smollm2:135m", "small"]\n'
    lines = check(MODELS + '[[models]]\nmodel = "smollm2:135m"\n' + route)
    [fact] = [line for line in lines if line.startswith("model smollm2:135m")]
    assert "`penstock pull smollm2:135m` fetches" in fact


def test_a_route_by_agreement_is_told(check: Callable[..., list[str]]) -> None:
    by = '[[routes]]\nname = "auto"\nweak = "small"\nstrong = "large"\nconfidence = "agreement"\nagreement = 0.6\n'
    told = [line.split("  ")[-1].strip() for line in check(MODELS + by, "--question", "What is red?")[-2:]]
    assert told == [
        "small answers 5 times; large unless a share of 0.6 says the same",
        "small begins, and the agreement of its answers decides",
    ]


@pytest.mark.parametrize(
    ("keys", "rule", "decision"),
    [
        (
            'weak = "small"\nstrong = "large"\nconfidence = "verifier"\nleast = 0.6\n',
            "small; large unless small says with 0.6 that the answer is right",
            "small begins, and small decides",
        ),
        ('ensemble = ["small", "large"]\n', "small, large together; the majority chooses", "small, large together"),
    ],
)
def test_verifiers_and_ensembles_are_told(check: Callable[..., list[str]], keys: str, rule: str, decision: str) -> None:
    lines = check(MODELS + '[[routes]]\nname = "auto"\n' + keys, "--question", "What is red?")
    assert [line.split("  ")[-1].strip() for line in lines[-2:]] == [rule, decision]


def test_a_missing_key_is_told_by_its_variable(check: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUD_KEY")
    lines = check(MODELS + FAR, code=2)
    assert any("the environment variable CLOUD_KEY has no key. Set CLOUD_KEY." in line for line in lines)


def test_a_configuration_without_routes_has_nothing_to_check(check: Callable[..., list[str]]) -> None:
    assert check(MODELS, code=1) == [
        "error: The configuration has no routes. Name a file with [[routes]] by --config.",
    ]


def test_pipelines_and_their_helpers_are_checked(check: Callable[..., list[str]]) -> None:
    tables = '[[pipelines]]\nname = "docs"\nindex = "nope.index"\nmodel = "small"\ncheck = "vectors"\nreranker = "large"\n'
    lines = check(MODELS + tables, code=1)
    faults = [line for line in lines if line.startswith("error: ")]
    for part in ("does not exist", "vectors is to answer or to judge", "large is named as a reranker, and is none"):
        assert sum(part in fault for fault in faults) == 1, (part, faults)
