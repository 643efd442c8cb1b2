"""The files around the board and the alerts, as YAML. `$target` and others are filled in by `render.py`."""

EDIT = "# Written by `penstock monitoring render`, which overwrites changes.\n"

PROMETHEUS = """\
global:
  scrape_interval: 5s
  evaluation_interval: 15s

rule_files: [rules.yaml]

scrape_configs:
  - job_name: penstock
    # A server with keys wants one here, too:
    # authorization: {credentials: KEY}
    static_configs:
      - targets: [$target]
"""

RULES = """\
groups:
  - name: penstock
    rules:
      # Of a server's models the busiest counts. Each server needs at least itself, so a sum can't fall. If none needs
      # another, the mean load of all decides. `and` drops servers that were removed in these five minutes.
      - record: penstock:desired_replicas
        expr: >-
          (sum(max by (instance) (penstock_desired_replicas)) > count(max by (instance) (penstock_desired_replicas)))
          or clamp_min(ceil(sum(max by (instance) (
            avg_over_time(penstock_utilisation_ratio[5m]) and penstock_utilisation_ratio
          )) / 0.8), 1)
"""

ALERT = """\
      - alert: $name
        expr: >-
          $query
        for: $lasts
        labels: {severity: $severity}
        annotations:
          summary: '$summary'
          runbook_url: $url
"""

RUNBOOK = """\
# $name

$means

- severity: $severity
- fires after: $lasts

```promql
$query
```

## How to see it

$look

## What to change

$change
"""

DATASOURCE = """\
apiVersion: 1

datasources:
  - name: Prometheus
    uid: penstock-prometheus
    type: prometheus
    access: proxy
    url: http://prometheus:9090
    isDefault: true
    editable: false
    jsonData:
      timeInterval: 5s  # as scrape_interval
      exemplarTraceIdDestinations:
        - name: request_id
          url: $link
"""

DASHBOARDS = """\
apiVersion: 1

providers:
  - name: penstock
    type: file
    disableDeletion: true
    allowUiUpdates: false
    options:
      path: /etc/grafana/dashboards
"""

COMPOSE = """\
#   export GRAFANA_PASSWORD=$$(openssl rand -hex 16); echo $$GRAFANA_PASSWORD
#   docker compose up
x-hardened: &hardened
  read_only: true
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  restart: unless-stopped
  mem_limit: 512m

services:
  prometheus:
    <<: *hardened
    image: docker.io/prom/prometheus:v3.13.4
    command:
      - --config.file=/etc/prometheus/prometheus.yaml
      - --storage.tsdb.path=/prometheus
      - --storage.tsdb.retention.time=15d
      - --storage.tsdb.retention.size=1GB
      - --enable-feature=exemplar-storage
    extra_hosts: ["host.docker.internal:host-gateway"]
    volumes:
      - ./prometheus.yaml:/etc/prometheus/prometheus.yaml:ro
      - ./rules.yaml:/etc/prometheus/rules.yaml:ro
      - measured:/prometheus

  grafana:
    <<: *hardened
    image: docker.io/grafana/grafana:12.4.4
    environment:
      GF_SECURITY_ADMIN_PASSWORD: $${GRAFANA_PASSWORD:?set it to a password of your own for the user admin of Grafana}
      GF_ANALYTICS_REPORTING_ENABLED: "false"
      GF_ANALYTICS_CHECK_FOR_UPDATES: "false"
      GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES: "false"
      GF_PLUGINS_PREINSTALL_DISABLED: "true"
      GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: /etc/grafana/dashboards/penstock.json
    ports: ["127.0.0.1:3000:3000"]
    volumes:
      - ./datasource.yaml:/etc/grafana/provisioning/datasources/penstock.yaml:ro
      - ./dashboards.yaml:/etc/grafana/provisioning/dashboards/penstock.yaml:ro
      - ./penstock.json:/etc/grafana/dashboards/penstock.json:ro
      - grafana:/var/lib/grafana
    tmpfs: [/tmp]

volumes:
  measured:
  grafana:
"""

KEDA = """\
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {name: penstock}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: penstock}
  minReplicaCount: 1
  maxReplicaCount: 8
  pollingInterval: 15
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata: {serverAddress: "http://prometheus:9090", query: "penstock:desired_replicas", threshold: "1"}
"""

# The metric comes from prometheus-adapter, with the values of the comment.
HPA = """\
# Values of prometheus-adapter, which gives the metric:
#   rules:
#     external:
#       - seriesQuery: penstock:desired_replicas
#         metricsQuery: penstock:desired_replicas
#         name: {as: penstock_desired_replicas}
#         resources: {namespaced: false}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: penstock}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: penstock}
  minReplicas: 1
  maxReplicas: 8
  metrics:
    - type: External
      external:
        metric: {name: penstock_desired_replicas}
        target: {type: AverageValue, averageValue: "1"}
"""
