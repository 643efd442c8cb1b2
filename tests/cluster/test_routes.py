"""Routes and pipelines of a cluster, whose models have replicas: threads with real kernels, and no Ray is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock.cli.cluster import _read_again
from penstock.config import Config
from penstock.config.components import config_from
from penstock.config.pipelines import PipelineConfig
from penstock.config.routes import FallbackConfig, RouteConfig
from penstock.config.routing import Routing
from penstock.llm import LLM
from penstock.search.index import create, update
from penstock.types.errors import ConfigError
from support.parity.encoder_cases import ENCODERS, write_encoder
from support.site import site
from support.tiny_models import TinyLlama, write_gguf

AUTO = Routing(routes=(RouteConfig(name="auto", by=FallbackConfig(models=("small", "large"))),))


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    folder = tmp_path_factory.mktemp("models")
    paths = {
        "small": write_gguf(folder / "1.gguf", TinyLlama(seed=1, max_model_len=1024)),
        "large": write_gguf(folder / "2.gguf", TinyLlama(seed=2, max_model_len=1024)),
        "vectors": write_encoder(ENCODERS["bert"], folder / "encoder"),
    }

    def config(name: str) -> Config:
        values = {"model": str(paths[name]), "served_model_name": (name,), "threads": 1, "replicas": 1}
        memory = {} if name == "vectors" else {"kv_cache_memory": 4 << 20}
        return config_from({**values, **memory, "shutdown_timeout": 0.0, "port": 0})

    return config


def test_a_route_goes_to_replicas(make: Callable[..., Config]) -> None:
    with site(make("small"), make("large"), routing=AUTO) as cluster:
        assert cluster.names() == ["small", "large", "auto"]
        assert cluster.ask("auto") == cluster.ask("small") != cluster.ask("large")
        with pytest.raises(ConfigError, match="The route auto needs 'large', which is not served"):
            cluster.models.update([make("small")], AUTO)
        assert cluster.ask("auto") == cluster.ask("small")


def test_routes_stay_as_they_are_in_an_update(make: Callable[..., Config], tmp_path: Path) -> None:
    with site(make("small"), make("large"), routing=AUTO) as cluster:
        path = tmp_path / "cluster.toml"
        path.write_text('model = "smollm2:135m"\n[[routes]]\nname = "auto"\nfallback = ["large", "small"]\n')
        with pytest.raises(ConfigError, match="can't change in an update"):
            cluster.models.update(*_read_again(["--config", str(path)]))


def test_a_route_of_a_model_that_is_not_there_starts_no_replica(make: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="The route auto needs 'large'"), site(make("small"), routing=AUTO):
        pass


def test_a_pipeline_searches_with_one_replica_and_answers_with_another(make: Callable[..., Config], tmp_path: Path) -> None:
    documents, file = tmp_path / "documents", tmp_path / "documents.index"
    documents.mkdir()
    (documents / "red.txt").write_text("Red is a colour.")
    create(file, documents, "vectors")
    with LLM(make("vectors").model.model) as llm:
        [vector] = [one.outputs.embedding for one in llm.embed("Red is a colour.")]
    [*_] = update(file, documents, lambda texts: np.array([vector for _ in texts], np.float32))
    routing = Routing(pipelines=(PipelineConfig(name="docs", index=str(file), model="small", template="{sources}{question}"),))
    with site(make("small"), make("vectors"), routing=routing) as cluster:
        body = {"model": "docs", "prompt": "abc", "temperature": 0, "max_tokens": 4}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert (answer.status_code, answer.headers.get("x-sources")) == (200, "1=red.txt"), answer.text
        assert answer.json()["usage"]["prompt_tokens"] > len("abc")
