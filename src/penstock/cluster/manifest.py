"""Writes the Kubernetes manifest of a cluster, for KubeRay's operator (https://docs.ray.io/en/latest/cluster/kubernetes).

The head's container starts Ray with the command that KubeRay gives it, and the server beside it. Each worker has one replica.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from penstock.cluster.front import check
from penstock.config import Config, ServerConfig
from penstock.config.components import COMPONENTS
from penstock.config.saved import write_config_file
from penstock.config.setting import settings_of
from penstock.models.catalog import is_fetched
from penstock.types.errors import ConfigError

_SET_HERE = ("host", "port", "threads")
_REFUSED = {
    "api_key_file": "Put the keys into the Secret, as its api-key.",
    "api_keys_file": "Put the keys into the Secret, as its api-key, or add api_keys_file and a volume to the written manifest.",
    "ssl_certfile": "Leave it out: an Ingress can speak TLS.",
    "ssl_keyfile": "Leave it out: an Ingress can speak TLS.",
    "kv_disk_path": "Leave it out: the disk of each pod is used.",
    "jobs_dir": "Leave it out: batches would be lost with the pod. Or add jobs_dir and a volume to the written manifest.",
}
"""Settings that name files of this machine -> what to do instead."""
_HEAD_COMMAND = "$KUBERAY_GEN_RAY_START_CMD & exec penstock cluster up --address auto --config /etc/penstock/cluster.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    name: str
    image: str
    """An image with Penstock and its extra `ray`."""
    cpus: int
    """CPUs of a worker, and threads of its replica."""
    memory: str
    """Memory of a worker, as Kubernetes writes it."""
    ray_version: str


def manifest(config: Config, pods: Pods) -> str:
    """Return the settings as a ConfigMap, a RayCluster with a worker for each of the most replicas, and a Service, as YAML.

    Raises ConfigError for settings that such a cluster can't have.
    """
    check(config)
    for part in (config.kv, config.server):
        for item in settings_of(type(part)):
            if item.key in _REFUSED and getattr(part, item.field) != item.default:
                raise ConfigError(f"A manifest can't have {item.flag}.", remedy=_REFUSED[item.key])
    components = [name for name, _ in COMPONENTS if name != "cluster"]
    settings = write_config_file(config, [], components=components, without=_SET_HERE)
    for key, value in {
        "threads": pods.cpus,
        "replicas": config.cluster.replicas,
        "max_replicas": config.cluster.most,
        "router": config.cluster.router,
        "resume": config.cluster.resume,
        "host": "0.0.0.0",  # noqa: S104  # of the pod; the key comes from a Secret
        "port": 8000,
    }.items():
        settings += f"{key} = {json.dumps(value)}\n"
    name = pods.name
    return f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  cluster.toml: |
{_indented(settings, 4)}
---
apiVersion: ray.io/v1
kind: RayCluster
metadata:
  name: {name}
  annotations:
    ray.io/overwrite-container-cmd: "true"
spec:
  rayVersion: {json.dumps(pods.ray_version)}
  headGroupSpec:
    rayStartParams:
      num-cpus: "0"
      dashboard-host: 127.0.0.1
    template:
      metadata:
        labels:
          app: {name}
      spec:
{_indented(_pod(config, pods, is_head=True), 8)}
  workerGroupSpecs:
    - groupName: replicas
      replicas: {config.cluster.most}
      minReplicas: {config.cluster.most}
      maxReplicas: {config.cluster.most}
      rayStartParams:
        num-cpus: "{pods.cpus}"
      template:
        spec:
{_indented(_pod(config, pods, is_head=False), 10)}
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  selector:
    app: {name}
  ports:
    - name: http
      port: 8000
      targetPort: 8000
"""


def _pod(config: Config, pods: Pods, *, is_head: bool) -> str:
    name, image, model = pods.name, json.dumps(pods.image), config.model.model
    command = "ulimit -n 65536; " + (_HEAD_COMMAND if is_head else "exec $KUBERAY_GEN_RAY_START_CMD")
    cpus, memory = ("1", "4Gi") if is_head else (str(pods.cpus), pods.memory)
    of_head = f"""\
    - name: PENSTOCK_REPLICA_HOST
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
{_secrets(config, name)}\
  ports:
    - name: http
      containerPort: 8000
  readinessProbe:
    httpGet:
      path: /ready
      port: 8000
"""
    weights = f"""\
initContainers:
- name: weights
  image: {image}
  command: ["penstock", "pull", {json.dumps(model)}]
  env:
    - name: PENSTOCK_CACHE
      value: /models
  volumeMounts:
    - name: models
      mountPath: /models
"""
    return f"""\
enableServiceLinks: false
terminationGracePeriodSeconds: {math.ceil(config.server.shutdown_timeout_s) + 15}
{weights if is_fetched(model) else ""}\
containers:
- name: {"head" if is_head else "replica"}
  image: {image}
  command: ["/bin/bash", "-c"]
  args: [{json.dumps(command)}]
  env:
    - name: PENSTOCK_CACHE
      value: /models
{of_head if is_head else ""}\
  resources:
    limits:
      cpu: "{cpus}"
      memory: {memory}
    requests:
      cpu: "{cpus}"
      memory: {memory}
  volumeMounts:
    - name: models
      mountPath: /models
    - name: settings
      mountPath: /etc/penstock
volumes:
- name: models
  emptyDir: {{}}
- name: settings
  configMap:
    name: {name}"""


def _secrets(config: Config, name: str) -> str:
    """Return the environment variables of the head that come from the Secret: the API key, and other secrets that are set."""
    return "".join(
        f"""\
    - name: {item.env}
      valueFrom:
        secretKeyRef:
          name: {name}
          key: {item.key.replace("_", "-")}
"""
        for item in settings_of(ServerConfig)
        if item.is_secret and (item.key == "api_key" or getattr(config.server, item.field))
    )


def _indented(text: str, width: int) -> str:
    return "\n".join(" " * width + line if line else line for line in text.rstrip("\n").split("\n"))
