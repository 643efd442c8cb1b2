"""The documentation is right: its how-to pages run, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Self

import numpy as np
import pytest
from click import Context

from parity import checked
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.cli.main import cli, main
from penstock.config.components import Config, KvConfig, SchedulerConfig, config_from
from penstock.config.routes import LearnedConfig
from penstock.config.several import configs_of
from penstock.config.sources import read_config_file
from penstock.deploy.policies import choose_policies
from penstock.lab.cost_files import SavedCost, save_cost
from penstock.lab.cost_model import CostModel
from penstock.models import architectures, catalog
from penstock.models.load import load_model
from penstock.routes.answers import read_answers
from penstock.types.kv_dtype import KvDtype
from support.doctor.stage import Stage, Visitor
from support.parity.executors import ParityExecutor
from support.parity.tiny import case_token_ids, kept_positions, load_golden, write_case

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
HOW_TOS = [
    *(
        page
        for page in sorted((ROOT / "docs" / "how-to").glob("*.md"))
        if page.stem not in ("several-models", "deploy", "release", "cascade", "tracing", "monitoring", "doctor")
    ),  # no Python, or a test of its own
    ROOT / "docs" / "tutorial" / "your-own-policy.md",
]
SIZES = {"num_blocks": 8, "block_size": 16, "max_rows": 32, "max_step_tokens": 64, "max_model_len": 256}
TUTORIALS = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorial").glob("*.md"))]


def run_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that a page's Python blocks make, one after the other."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    module = ModuleType(f"how_to_{page.stem}")
    for name in (module.__name__, "my_policy"):  # Dataclasses look their module up, tests of a page import from their file.
        monkeypatch.setitem(sys.modules, name, module)
    for block in blocks:
        exec(compile(block, str(page), "exec"), vars(module))
    return module


def test_the_examples_of_the_lab_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_cost(Path("cost.json"), SavedCost(cost=CostModel(), source="profile", model="tiny"))
    Stage([Visitor(at_s=0.1)], record=Path("traffic.rec"))
    printed = {}
    for name in ("simulate", "profile", "recording"):
        run_page(ROOT / "docs" / f"{name}.md", monkeypatch)
        printed[name] = capsys.readouterr().out
    assert printed["profile"].startswith("tiny")
    assert len(printed["recording"].splitlines()) > 1, "steps and a request"


class Calculator:
    """A model that adds and multiplies; the small one errs with numbers above 9."""

    def __init__(self, model: str) -> None:
        self._is_small = model == "smollm2:135m"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def chat(self, chats: list[list[dict[str, str]]], _params: object) -> list[SimpleNamespace]:
        sums = [chat[-1]["content"] for chat in chats]
        results = [eval(text) + (self._is_small and len(text) > 5) for text in sums]
        texts = [f"{text} = {result}" for text, result in zip(sums, results, strict=True)]
        return [SimpleNamespace(outputs=[SimpleNamespace(text=text)]) for text in texts]


def test_the_page_of_cascades_makes_answers_that_a_fit_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock.LLM", Calculator)
    page = ROOT / "docs" / "how-to" / "cascade.md"
    run_page(page, monkeypatch)
    answers = read_answers(tmp_path / "answers.jsonl", weak="small", strong="large")
    assert (len(answers), answers.strong.mean()) == (300, 1.0)
    assert 0.1 < answers.weak.mean() < 0.9
    assert all(len(chat) == 13 for chat in answers.chats)
    config = tmp_path / "penstock.toml"
    config.write_text(re.search(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)[1])  # type: ignore[index]
    [route] = read_config_file(config).routing.routes
    assert isinstance(route.by, LearnedConfig)
    assert (route.by.weak, route.by.file) == ("smollm2:135m", str(tmp_path / "answers.jsonl.route.json"))


def test_the_file_of_several_models_is_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "several-models.md").read_text(encoding="utf-8")
    path = tmp_path / "penstock.toml"
    path.write_text(re.search(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1])  # type: ignore[index]
    file = read_config_file(path)
    configs = configs_of(file.values, words=("minilm", "notes"), tables=file.models)
    assert [config.model.model for config in configs] == ["minilm", "~/models/notes.gguf", "qwen2.5-coder:1.5b"]
    assert [config.scheduler.max_num_seqs for config in configs] == [32] * 3


@pytest.mark.parametrize("page", HOW_TOS, ids=lambda page: page.stem)
def test_how_to_pages_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page, monkeypatch)


def test_a_cost_model_is_read_as_its_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_cost(Path("cost.json"), SavedCost(cost=CostModel(), source="profile"))
    run_page(ROOT / "docs" / "profile.md", monkeypatch)


def test_the_architecture_of_its_page_has_the_logits_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served by the page's description and tables of names, not by those of the package."""
    page = run_page(ROOT / "docs" / "how-to" / "add-a-model.md", monkeypatch)
    known = {**architectures.ARCHITECTURES, "gemma2": f"{page.__name__}:GEMMA2"}
    monkeypatch.setattr(architectures, "ARCHITECTURES", known)
    for name, case in {"gemma2": page.case, "gemma2_gguf": page.of_gguf_file}.items():
        model = load_model(catalog.resolve(str(write_case(case, tmp_path / name)), tmp_path))
        program, golden = page.describe(model.spec), load_golden(name)
        executors: list[tuple[ParityExecutor, float]] = [
            (ReferenceExecutor(model, program, kv_dtype=KvDtype.BF16, **SIZES), 0.001),
            (NativeExecutor(model, program, kv_dtype=KvDtype.BF16, num_threads=1, **SIZES), 0.05),
        ]
        for executor, allowed in executors:
            with closing(executor):
                logits = executor.forward_logits(case_token_ids(case))[kept_positions(case)]
            assert np.sqrt(((logits - golden.logits) ** 2).mean()) < allowed * golden.std


def test_the_table_of_what_was_checked_is_that_of_the_cases() -> None:
    page = checked.PAGE.read_text(encoding="utf-8")
    assert page.count(checked.BEGIN) == page.count(checked.END) == 1
    assert checked.written_into(page) == page, "run `make docs`"
    assert checked.REAL_WEIGHTS.keys() <= architectures.ARCHITECTURES.keys()


def test_the_policies_of_their_pages_are_simulated_and_served_as_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("tutorial/your-own-policy.md", "how-to/policy.md")
    pages = "".join([(ROOT / "docs" / name).read_text(encoding="utf-8") for name in names])
    files = re.findall(r"^```python\n(# my_policy.py\n.*?)^```", pages, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_policy.py").write_text("\n".join(files))
    (tmp_path / "penstock.toml").write_text(re.search(r"^```toml\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)[1])  # type: ignore[index]
    monkeypatch.chdir(tmp_path)
    order, victim = re.findall(r"^```sh\n.venv/bin/penstock (simulate .*?)\n```", pages, re.MULTILINE | re.DOTALL)
    for command in (order, victim):
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(command.replace("\\\n", " ")), "--requests", "100"])
        out, err = capsys.readouterr()
        assert (ended.value.code, err) == (0, "")
        assert re.search(r"^[1-9]\d* of 100 requests get their first or last token at another time", out, re.MULTILINE)
    config = config_from(read_config_file(tmp_path / "penstock.toml").values)
    assert choose_policies(config).make().order._policy.delay_per_token_ns == 5_000_000  # type: ignore[attr-defined]
    own = {"victim": "FewestGenerated", "budget": "ShareForPrompts", "batching": "FewAtATime", "reserve": "HalfOfTheAnswer"}
    kv = KvConfig(kv_eviction="./my_policy.py:BatchJobsFirst")
    scheduler = SchedulerConfig(**{key: f"./my_policy.py:{name}" for key, name in own.items()})
    assert choose_policies(Config(scheduler=scheduler, kv=kv)).make().gate.is_continuous


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_is_listed_by_help() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split())  # type: ignore[index]
    assert phony == set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))


def test_the_native_module_is_built_again_after_a_change_of_any_source() -> None:
    builds = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    shared = set(re.findall(r"\bsrc/penstock/\S+\.h\b", builds))
    assert shared
    for path in ("Makefile", "tests/pythons/run.sh"):
        assert [name for name in shared if name not in (ROOT / path).read_text(encoding="utf-8")] == [], path


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_commands_for_beginners_exist(page: Path) -> None:
    """Each `penstock COMMAND --flag` and `make target` of a first page is one that there is."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        words = line.split("#")[0].split()
        if "make" in words:
            assert words[words.index("make") + 1] in targets, line
        start = next((idx for idx, word in enumerate(words) if word.endswith("penstock")), None)
        if start is not None:
            command = cli.get_command(Context(cli), words[start + 1])
            assert command is not None, line
            flags = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words[start:] if word.startswith("--")} <= flags, line


READ_PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "notes"]
"""The pages to read; notes keep tables of figures as they were printed."""
MAX_COLUMNS = 120
MAX_WORDS = 80_000


@pytest.mark.parametrize("page", READ_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit_a_screen(page: Path) -> None:
    """Code and addresses do not count."""
    text = re.sub(
        r"^ *```.*?^ *```", lambda code: "\n" * code[0].count("\n"), page.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    lines = [re.sub(r"https?://\S+", "", line) for line in text.splitlines()]
    assert not [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS and not line.startswith("    ")]


def test_the_pages_can_be_read_in_a_working_day() -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in READ_PAGES)
    assert words <= MAX_WORDS, f"docs has {words:,} words, at most {MAX_WORDS:,}: shorten a page, or move a table to docs/notes"


def site_pages() -> list[str]:
    """The pages in the navigation of the documentation site, as paths below docs/."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    return re.findall(r"([\w./-]+\.md)$", nav, re.MULTILINE)


def test_the_site_s_navigation_lists_every_page_once() -> None:
    listed = site_pages()
    assert len(listed) == len(set(listed))
    assert set(listed) == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_of_the_site_link_to_each_other_and_to_headings_that_exist(page: Path) -> None:
    """A link out of docs/ would lead nowhere on the site."""
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        found = (page.parent / target).resolve() if target else page
        assert found.is_file(), f"{page.name} links to {target}"
        assert found.is_relative_to(ROOT / "docs"), f"{page.name} links to {target}, which is not on the site"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}#{anchor}, and there is no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_reference_names_modules_that_exist() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    modules = [name for page in pages for name in re.findall(r"^::: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert modules
    for name in modules:
        path = ROOT / "src" / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), f"the reference names {name}"
