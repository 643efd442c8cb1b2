"""Deployments of models that were started by other means than a deployment."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.upstreams import UpstreamConfig
from penstock.deploy.deployment import Deployment
from penstock.deploy.pipelines import Pipeline
from penstock.deploy.resources import MemoryBudget, MemoryShare
from penstock.deploy.routes import Route
from penstock.deploy.running import RunningModel, ServedModel
from penstock.deploy.splits import Split


def deployment_of(
    *models: RunningModel,
    splits: Sequence[Split] = (),
    routes: Sequence[Route] = (),
    upstreams: Sequence[UpstreamConfig] = (),
    pipelines: Sequence[Pipeline] = (),
) -> Deployment:
    """Return a deployment of running models, which it never unloads. Closing the deployment closes the models."""
    served = [
        ServedModel(
            names=running.model.served_names,
            aliases=running.model.aliases,
            adapters=running.adapters,
            metrics=running.metrics,
            load=lambda running=running: running,
            plan=lambda: MemoryShare(num_reserve_bytes=0),
            is_fixed=True,
        )
        for running in models
    ]
    deployment = Deployment(served, MemoryBudget(), splits=splits, routes=routes, upstreams=upstreams, pipelines=pipelines)
    deployment.sources = models[0].sources
    for one in served:
        deployment.want(one)
    deployment.tend()
    assert len(deployment.running) == len(models)
    return deployment
