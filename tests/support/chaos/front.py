"""A process with the front of a cluster: `python -m support.chaos.front HTTP_PORT REPLICA_PORT SILENCE_S`."""

from __future__ import annotations

import argparse
import logging

from penstock.clock import WallClock
from penstock.cluster import fleet as fleet_module
from penstock.cluster.fleet import ANSWER, LOST, Fleet
from penstock.config import ServerConfig
from penstock.engine.bridge import Bridge
from penstock.sched.routing import dispatcher
from penstock.sched.routing.routers import PrefixAware
from penstock.serve.http.listener import bind_socket
from penstock.serve.server import Server
from support.chaos.console import listen, say
from support.cluster import SECRET, Apart, make_front
from support.deployments import deployment_of
from support.server.harness import wait_until


class CountingFleet(Fleet):
    """Counts what happens to requests."""

    num_resumed = 0
    """Requests moved that had tokens already."""
    num_sources = 0
    """Requests whose replica could copy KV from another one."""

    def _move(self, flights) -> None:
        flights = list(flights)
        self.num_resumed += sum(bool(flight.request.output_token_ids) for flight in flights)
        super()._move(flights)

    def _source(self, choice):
        source = super()._source(choice)
        self.num_sources += source is not None
        return source

    def status(self) -> dict:
        dispatcher = self._dispatcher
        return {
            "flights": len(self._flights),
            "in_flight": self._outbox.counts()[0],
            "work": sum(dispatcher._all.work),
            "entries": len(dispatcher._all._entries),
            "expected": len(dispatcher._holdings._expected) + len(dispatcher._holdings._coming),
            "strangers": len(self._replicas) - len(self._by_number),
            "inbox": len(self._inbox),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("http_port", type=int)
    parser.add_argument("replica_port", type=int)
    parser.add_argument("silence_s", type=float)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    fleet_module.SILENCE_NS = int(arguments.silence_s * 1e9)

    bridge = Bridge()
    listener = bind_socket("127.0.0.1", arguments.replica_port)
    dispatcher.Split = Apart
    fleet = CountingFleet(listener, secret=SECRET, router=PrefixAware(), clock=WallClock(), sink=bridge.deliver, slo_itl_ns=1)
    fleet.start()
    wait_until(lambda: fleet.num_replicas, 60)
    front = make_front(fleet, bridge, max_queue=1000)
    config = ServerConfig(port=arguments.http_port, shutdown_timeout_s=0.0)
    server = Server(
        deployment_of(front),
        config,
        bind_socket("127.0.0.1", arguments.http_port),
        announce=lambda _: say(is_ready=True),
    )

    def status() -> dict:
        return {
            "busy": fleet.status() | {"readers": bridge.num_open_requests},
            "replicas": fleet.num_replicas,
            "moved": fleet.num_moved[LOST],
            "resumed": fleet.num_resumed,
            "handed_over": fleet.num_moved[ANSWER],
            "sources": fleet.num_sources,
        }

    listen({"status": status})
    server.run()


if __name__ == "__main__":
    main()
