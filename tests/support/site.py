"""A whole cluster without Ray: a live server before replicas with real kernels, which are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from penstock.cluster.models import ClusterModels
from penstock.cluster.process import ReplicaThread
from penstock.config import Config
from penstock.config.routing import Routing
from penstock.deploy.deployment import Deployment
from penstock.serve.http.listener import bind_socket
from penstock.serve.server import Server
from penstock.types.errors import PenstockError
from support.server.completions import URL
from support.server.harness import wait_until


class ThreadCrew:
    """Replicas in threads of this process."""

    def __init__(
        self, made: list[ThreadCrew], error: Exception | None, config: Config, *, num_beside: int, **where: Any
    ) -> None:
        self.first, self.config, self._num_beside, self._where = config.cluster.replicas, config, num_beside, where
        self.replicas: list[ReplicaThread] = []
        self._error = error
        self.num_stops = 0
        made.append(self)

    def start(self) -> None:
        if self._error is not None:
            raise self._error
        for number in range(self.first):
            name, beside = f"r{number}", self._num_beside
            self.replicas.append(ReplicaThread(self.config, name=name, num_beside=beside, **self._where))

    def want(self, num_replicas: int) -> None:
        raise AssertionError("their number is fixed")

    def stop(self) -> None:
        self.num_stops += 1
        for replica in self.replicas:
            replica.leave(1.0)

    def room(self) -> str:
        return "there is room"


class Site:
    """A live server before a cluster."""

    def __init__(self, *configs: Config, routing: Routing) -> None:
        self.crews: list[ThreadCrew] = []
        self.error: Exception | None = None
        """The next crew fails with it."""
        self.models = ClusterModels(configs, routing, bind_socket, is_elsewhere=False)
        self.next: list[Config] = []
        """The configuration, when it is read again."""
        self.deployment: Deployment = self.models.start(self._make_crew, 1)
        self.deployment.update = lambda: self.models.update(self.next, routing)
        listener, ready = bind_socket("127.0.0.1", 0), queue.Queue[str]()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = Server(self.deployment, configs[0].server, listener, announce=ready.put)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        ready.get(timeout=30)

    def have_all_joined(self) -> bool:
        """A cluster serves once the first replica of each model has joined."""
        joined = [sum(one.is_ready for one in front.metrics.read_replicas()) for front in self.deployment.running]
        return joined == [crew.first for crew in self.crews]

    def _make_crew(self, config: Config, **where: Any) -> ThreadCrew:
        return ThreadCrew(self.crews, self.error, config, **where)

    def close(self) -> None:
        self._server.request_shutdown()
        self._thread.join(30)
        self.models.close()

    def ask(self, model: str = "toy", user: str = "") -> str:
        body = {"model": model, "prompt": "abc", "temperature": 0, "max_tokens": 8, "user": user}
        answer = httpx.post(self.url + URL, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def update(self, *configs: Config) -> list[str]:
        self.next = list(configs)
        answer = httpx.post(f"{self.url}/cluster/update", timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["changes"]

    def names(self) -> list[str]:
        return [one["id"] for one in httpx.get(f"{self.url}/v1/models").json()["data"]]

    def num_answers(self) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("penstock_request_success_total{") and 'reason="length"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in counts)


@contextmanager
def site(*configs: Config, routing: Routing | None = None) -> Iterator[Site]:
    made = Site(*configs, routing=routing or Routing())
    try:
        wait_until(made.have_all_joined)
        yield made
    finally:
        with suppress(PenstockError):
            made.close()
