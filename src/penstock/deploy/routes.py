"""Routes of a deployment: names for which a learned route chooses one of two models by the question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.routes import RouteConfig
from penstock.types.errors import ConfigError

if TYPE_CHECKING:  # with NumPy, which a server starts without
    from penstock.routes.learned import LearnedRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    name: str
    weak: str
    strong: str
    learned: LearnedRoute
    threshold: float
    """Least gain with which the strong model answers."""

    @property
    def embedder(self) -> str:
        return self.learned.embedder

    def choose(self, states: bytes, question: str) -> tuple[str, float]:
        """Return the model that should answer, and what the strong one is expected to gain. `states`: float32, [width]"""
        import numpy as np

        vector = np.frombuffer(states, np.float32).astype(np.float64)
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
        gain = float(self.learned.gains(vector[None], [question])[0])
        return self.strong if gain >= self.threshold else self.weak, gain


def open_routes(configs: Sequence[RouteConfig]) -> list[Route]:
    """Read the routes' files. Raises ConfigError."""
    if not configs:
        return []
    from penstock.routes.learned import read_route

    routes = []
    for config in configs:
        learned = read_route(Path(config.file))
        threshold = learned.threshold(config.share)
        routes.append(Route(name=config.name, weak=config.weak, strong=config.strong, learned=learned, threshold=threshold))
    return routes


def check_routes(routes: Sequence[Route], by_name: Mapping[str, object]) -> None:
    """Raise ConfigError for a route with a model's name, or of models that are not served."""
    for route in routes:
        if route.name in by_name:
            raise ConfigError(f"A route is called {route.name!r}, and so is a model.", remedy="Rename the route.")
        for role, name in (("weak", route.weak), ("strong", route.strong), ("embedding", route.embedder)):
            if name not in by_name:
                raise ConfigError(
                    f"The {role} model of the route {route.name}, {name!r}, is not served.",
                    remedy=f"Name it beside the others, as in `penstock serve {route.weak} {route.strong} {route.embedder}`.",
                )
