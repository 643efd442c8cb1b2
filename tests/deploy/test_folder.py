"""The folder of models while a server runs: what comes is found once, by the rules of the start, and within bounds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, ModelConfig, SharingConfig
from penstock.deploy import folder as folder_module
from penstock.deploy.adapters import Adapters
from penstock.deploy.deployment import Deployment
from penstock.deploy.factory import start_deployment
from penstock.deploy.folder import ModelFolder
from penstock.deploy.resources import MemoryBudget, MemoryShare
from penstock.deploy.routes import Route
from penstock.deploy.running import ServedModel
from penstock.models import catalog
from penstock.models.catalog import ModelSource
from penstock.obs.metrics import Metrics
from penstock.types.errors import ConfigError


def served_of(source: ModelSource) -> ServedModel:
    if source.name == "bad":
        raise ConfigError("This can't be served.")
    never: Any = None
    return ServedModel(names=(source.name,), metrics=Metrics(source.name), load=never, plan=MemoryShare, path=source.path)


@pytest.fixture
def watched(tmp_path: Path) -> ModelFolder:
    (tmp_path / "old.gguf").touch()
    return ModelFolder(tmp_path, served_of, [tmp_path / "old.gguf"])


def names(found: list[ServedModel]) -> list[str]:
    return [one.name for one in found]


def test_a_model_that_comes_is_found_once_and_what_is_no_model_is_not(watched: ModelFolder, tmp_path: Path) -> None:
    assert watched.find_new() == []
    for file in ("b.gguf", "notes.txt", "s-00001-of-00002.gguf", "s-00002-of-00002.gguf"):
        (tmp_path / file).touch()
    (tmp_path / "hf").mkdir()
    assert names(watched.find_new()) == ["b", "s-00001-of-00002"]
    (tmp_path / "hf" / "config.json").touch()
    assert names(watched.find_new()) == ["hf"], "now it is a model"
    assert watched.find_new() == []


def test_a_model_with_a_relative_path_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.gguf").touch()
    assert ModelFolder(Path(), served_of, [Path("old.gguf")]).find_new() == []


def test_one_that_is_no_use_is_told_once_and_hinders_no_other(
    watched: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in ("bad.gguf", "good.gguf"):
        (tmp_path / file).touch()
    assert names(watched.find_new()) == ["good"]
    assert watched.find_new() == []
    assert caplog.text.count("bad.gguf is not served: This can't be served.") == 1


def test_a_folder_that_is_gone_or_has_too_much_is_told_once(
    watched: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MAX_FOLDER_ENTRIES", 3)
    for number in range(4):
        (tmp_path / f"{number}.gguf").touch()
    for _ in range(2):
        assert watched.find_new() == []
    assert caplog.text.count("has more than 3 entries") == 1


def test_so_many_are_taken_in_and_no_more(
    watched: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "MAX_FOUND", 2)
    for number in range(4):
        (tmp_path / f"{number}.gguf").touch()
    assert names(watched.find_new()) == ["0", "1"]
    assert watched.find_new() == []
    assert caplog.text.count("2 models were found") == 1


def test_a_model_with_another_s_name_is_not_taken_in(
    watched: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").touch()
    first = served_of(ModelSource(name="old", kind=catalog.SourceKind.GGUF, path=tmp_path / "old.gguf"))
    deployment = Deployment([first], MemoryBudget(), find_new=watched.find_new)
    with caplog.at_level(logging.ERROR):
        deployment.look()
    assert deployment.served == (first,)
    assert "a model, adapter, route or pipeline has the name 'old'" in caplog.text
    (tmp_path / "new.gguf").touch()
    deployment.look()
    assert deployment.names == ("old", "new")
    (tmp_path / "new.gguf").unlink()
    deployment.look()
    assert (deployment.names, deployment.find("new")) == (("old",), None)


def test_a_route_hides_neither_a_model_that_comes_nor_an_adapter(
    watched: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = served_of(ModelSource(name="old", kind=catalog.SourceKind.GGUF, path=tmp_path / "old.gguf"))
    routes = [Route(name="auto", models=("old",))]
    deployment = Deployment([first], MemoryBudget(), find_new=watched.find_new, routes=routes)
    (tmp_path / "auto.gguf").touch()
    with caplog.at_level(logging.ERROR):
        deployment.look()
    assert deployment.served == (first,)
    assert "a model, adapter, route or pipeline has the name 'auto'" in caplog.text
    first.adapters = Adapters(modules={"auto": tmp_path})
    with pytest.raises(ConfigError, match="An adapter of old is called 'auto', as is another adapter, a model"):
        Deployment([first], MemoryBudget(), routes=routes)


def test_a_model_with_an_adapter_s_name_is_taken_in_once_the_adapter_is_unloaded(
    watched: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    does_fail = False

    def find_new() -> list[ServedModel]:
        if does_fail:
            raise OSError("the folder can't be listed")
        return watched.find_new()

    first = served_of(ModelSource(name="old", kind=catalog.SourceKind.GGUF, path=tmp_path / "old.gguf"))
    first.adapters = Adapters(modules={"new": tmp_path})
    deployment = Deployment([first], MemoryBudget(), find_new=find_new)
    (tmp_path / "new.gguf").touch()
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            deployment.look()
    assert deployment.served == (first,)
    assert caplog.text.count("has the name 'new'") == 1
    does_fail = True
    with pytest.raises(OSError, match="listed"):
        deployment.look()
    does_fail = False
    first.adapters.unload("new")
    deployment.look()
    assert deployment.names == ("old", "new")


def test_a_model_with_the_name_of_an_adapter_that_no_request_has_named_is_refused(
    watched: ModelFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = served_of(ModelSource(name="old", kind=catalog.SourceKind.GGUF, path=tmp_path / "old.gguf"))
    first.adapters = Adapters(folder=tmp_path / "adapters")
    (tmp_path / "adapters" / "new").mkdir(parents=True)
    (tmp_path / "adapters" / "new" / "adapter_config.json").touch()
    (tmp_path / "new.gguf").touch()
    deployment = Deployment([first], MemoryBudget(), find_new=watched.find_new)
    with caplog.at_level(logging.ERROR):
        deployment.look()
    assert deployment.served == (first,)
    assert "a model, adapter, route or pipeline has the name 'new'" in caplog.text
    new = served_of(ModelSource(name="new", kind=catalog.SourceKind.GGUF, path=tmp_path / "new.gguf"))
    with pytest.raises(ConfigError, match="An adapter of old is called 'new'"):
        Deployment([first, new], MemoryBudget())
    (tmp_path / "adapters" / "new" / "adapter_config.json").unlink()
    deployment.look()
    assert deployment.names == ("old", "new")


def test_models_and_adapters_may_be_in_one_folder(watched: ModelFolder, tmp_path: Path) -> None:
    first = served_of(ModelSource(name="old", kind=catalog.SourceKind.GGUF, path=tmp_path / "old.gguf"))
    first.adapters = Adapters(folder=tmp_path)
    deployment = Deployment([first], MemoryBudget(), find_new=watched.find_new)
    (tmp_path / "new.gguf").touch()
    deployment.look()
    assert deployment.names == ("old", "new")


def test_a_server_of_a_folder_leaves_room_for_those_that_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nums: list[int] = []

    class Told(Exception):
        pass

    def resources(_memory: MemoryBudget, *, num_models: int) -> None:
        nums.append(num_models)
        raise Told

    monkeypatch.setattr("penstock.deploy.factory.Resources", resources)
    (tmp_path / "one.gguf").touch()
    for folder in (None, str(tmp_path)):
        config = Config(model=ModelConfig(model=str(tmp_path / "one.gguf")), sharing=SharingConfig(models_dir=folder))
        with pytest.raises(Told):
            start_deployment([config], lambda _name, path: Config(model=ModelConfig(model=path)))
    assert nums == [1, 3]
