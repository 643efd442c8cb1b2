#!/usr/bin/env bash
# Every route of /openapi.json against schemathesis, on real servers: `make test-openapi`. Makes build/openapi-venv with it.
#
#   PORT=N          of the servers, which run one after the other (default 8972)
#   MAX_EXAMPLES=N  random requests of each route, beside those that cover its schema (default 20)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

VENV=build/openapi-venv
URL=http://127.0.0.1:${PORT:=8972}
TESTS=$PWD/tests
TOOLS=('schemathesis>=4.32,<5')
# The others are about rules that a schema can't say: which of the bodies that it allows are accepted.
CHECKS=no_server_fault,status_code_conformance,content_type_conformance,response_headers_conformance
CHECKS+=,response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance,ignored_auth,line_conformance

if [[ "$(cat "$VENV/.installed" 2>/dev/null)" != "${TOOLS[*]}" ]]; then
  .venv/bin/python -m venv "$VENV"
  "$VENV/bin/pip" install --quiet --disable-pip-version-check "${TOOLS[@]}"
  echo "${TOOLS[*]}" > "$VENV/.installed"
fi

JOBS=$(mktemp -d)
trap '[[ -z ${server:-} ]] || { kill "$server"; wait "$server" || true; }; rm -rf "$JOBS"' EXIT

# check MODEL KEY [ARGS OF THE SERVER]: has schemathesis ask a server of the model, with the key if that is not empty.
check() {
  local model=$1 key=$2 arguments=()
  shift 2
  .venv/bin/penstock pull "$model"
  .venv/bin/penstock serve "$model" --port "$PORT" --log-level error --jobs-dir "$JOBS" "$@" ${key:+--api-key "$key"} &
  server=$!
  [[ -z $key ]] || arguments=(--header "Authorization: Bearer $key")
  # In a folder of its own, where it leaves notes on what it has found.
  PENSTOCK_MODEL=$model PENSTOCK_URL=$URL PENSTOCK_KEY=$key SCHEMATHESIS_HOOKS=openapi.hooks PYTHONPATH=$TESTS \
    env -C "$VENV" bin/st run "$URL/openapi.json" \
    --wait-for-schema 60 --checks "$CHECKS" --phases examples,coverage,fuzzing --max-examples "${MAX_EXAMPLES:-20}" \
    --seed 1 --workers 4 --continue-on-failure --request-timeout 30 --suppress-health-check all --warnings off --no-color \
    "${arguments[@]}" || failed=1
  kill "$server"
  wait "$server" || failed=1
  server=
}

failed=0
check minilm ""
check smollm2:135m "" --max-model-len 64 --kv-cache-memory 64MiB
check smollm2:135m a-key --admin-api-key an-admins-key --max-model-len 64 --kv-cache-memory 64MiB
exit "$failed"
