#!/usr/bin/env bash
# The clients that people have, against real servers: `make test-clients`. Each gets its current release, in an environment of
# its own in build/clients, because they ask for different releases of each other.
#
#   run.sh [CLIENT ...]  those whose names are below (default: all of them)
#   PORT=N               of the servers, which run one after the other (default 8971)
#   RECORD=1             writes down what the clients send and get, in tests/clients/recorded; `make test` sends it again
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PORT=${PORT:-8971}
HERE=tests/clients
export PYTHONPATH=$PWD/tests
BUILT=build/clients
ALL=(encoders chats anthropic ollama openai litellm langchain instructor pydantic-ai smolagents openai-agents llama-index autogen javascript claude-code codex lm-eval dynamo)
export LITELLM_LOCAL_MODEL_COST_MAP=True # litellm reads its table of prices from its package, not from the network

# start PORT COMMAND: waits until what it runs answers there.
start() {
  local port=$1
  shift
  if (: <> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
    echo "error: another server listens on port $port; PORT=N chooses another" >&2
    exit 1
  fi
  "$@" &
  started+=($!)
  .venv/bin/python - "http://127.0.0.1:$port/ready" <<'PYTHON'
import sys, time, urllib.request

for _ in range(600):
    try:
        urllib.request.urlopen(sys.argv[1])
        break
    except OSError:
        time.sleep(0.1)
else:
    sys.exit("the server was not ready within a minute")
PYTHON
}

# install NAME PACKAGES: an environment of Python with their current releases.
install() {
  local folder=$BUILT/$1
  shift
  [[ "$(cat "$folder/.installed" 2>/dev/null)" != "$*" ]] || return 0
  .venv/bin/python -m venv "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
  echo "$*" > "$folder/.installed"
}

# ask NAME MODEL [ARGS OF THE SERVER] -- COMMAND: runs a command, with a server's URL as its last argument.
ask() {
  local name=$1 model=$2 port=$PORT
  shift 2
  local -a args=()
  while [[ $1 != -- ]]; do
    args+=("$1")
    shift
  done
  .venv/bin/penstock pull "$model"
  start "$port" .venv/bin/penstock serve "$model" --port "$port" "${args[@]}"
  if [[ -n ${RECORD:-} ]]; then
    port=$((PORT + 1))
    start "$port" .venv/bin/python $HERE/recorder.py "$port" "127.0.0.1:$PORT" "$HERE/recorded/$name.jsonl"
  fi
  "${@:2}" "http://127.0.0.1:$port" || failed=1
  stop
}

stop() {
  local pid
  for pid in "${started[@]}"; do
    kill "$pid" 2> /dev/null && wait "$pid" || true
  done
  started=()
}

check() {
  case $1 in
    encoders)
      install encoders openai langchain-openai llama-index-embeddings-openai cohere huggingface_hub numpy
      ask encoders minilm -- $BUILT/encoders/bin/python $HERE/encoders.py
      ;;
    chats)
      install chats cohere huggingface_hub
      ask chats smollm2:135m -- $BUILT/chats/bin/python $HERE/chats.py
      ;;
    anthropic)
      install anthropic anthropic
      ask anthropic smollm2:135m --api-key none -- $BUILT/anthropic/bin/python $HERE/messages.py
      ;;
    ollama)
      install ollama ollama
      ask ollama smollm2:135m minilm -- $BUILT/ollama/bin/python $HERE/with_ollama.py
      ;;
    openai)
      install openai openai
      ask openai smollm2:135m -- $BUILT/openai/bin/python $HERE/with_openai.py
      ;;
    litellm) framework litellm smollm2:135m litellm mcp ;; # its tools import mcp, which it does not bring
    langchain) framework langchain smollm2:135m langchain-openai ;;
    instructor) framework instructor smollm2:135m instructor ;;
    pydantic-ai) framework pydantic-ai qwen2.5-coder:1.5b 'pydantic-ai-slim[openai]' ;;
    smolagents) framework smolagents smollm2:135m 'smolagents[openai]' ;;
    openai-agents) framework openai-agents qwen2.5-coder:1.5b openai-agents ;;
    llama-index) framework llama-index qwen2.5-coder:1.5b llama-index-llms-openai-like ;;
    autogen) framework autogen qwen2.5-coder:1.5b 'autogen-ext[openai]' autogen-agentchat ;;
    javascript) javascript ;;
    claude-code) agent claude-code @anthropic-ai/claude-code@latest claude with_claude_code.py ;;
    codex) agent codex @openai/codex@latest codex with_codex.py ;;
    lm-eval)
      install lm-eval 'lm-eval[api]' transformers
      ask lm-eval smollm2:135m -- .venv/bin/python $HERE/perplexity.py $BUILT/lm-eval/bin/lm_eval
      ;;
    dynamo)
      install dynamo ai-dynamo-runtime
      ask dynamo smollm2:135m --kv-events "127.0.0.1:$((PORT + 2))" \
        -- $BUILT/dynamo/bin/python $HERE/with_dynamo.py "127.0.0.1:$((PORT + 2))"
      ;;
    *)
      echo "error: there is no client '$1'; there are: ${ALL[*]}" >&2
      exit 2
      ;;
  esac
}

framework() { # NAME MODEL PACKAGES
  local name=$1 model=$2
  install "$name" "${@:3}"
  ask "$name" "$model" -- "$BUILT/$name/bin/python" $HERE/frameworks.py "$name" "$model"
}

# npm_install FOLDER PACKAGES
npm_install() {
  local folder=$1
  shift
  if ! command -v npm > /dev/null; then
    echo "FAIL ${folder##*/}: npm is missing (Debian, Ubuntu: apt install npm)"
    failed=1
    return 1
  fi
  [[ "$(cat "$folder/.installed" 2>/dev/null)" != "$*" ]] || return 0
  mkdir -p "$folder"
  if ! npm install --silent --prefix "$folder" "$@"; then
    echo "FAIL ${folder##*/}: npm could not install $*"
    failed=1
    return 1
  fi
  echo "$*" > "$folder/.installed"
}

agent() { # NAME PACKAGE PROGRAM SCRIPT, which starts the server of a scripted model itself
  local folder=$BUILT/$1
  npm_install "$folder" "$2" || return 0
  .venv/bin/python "$HERE/$4" "$PWD/$folder/node_modules/.bin/$3" \
    ${RECORD:+"$HERE/recorded/$1.jsonl"} || failed=1
}

javascript() {
  local folder=$BUILT/javascript
  # The clients want a newer Node than distributions have; by their tag, as npm would choose releases for the one that is there.
  local -a packages=(node@22 openai@latest ai@latest @ai-sdk/openai-compatible@latest zod@latest)
  npm_install "$folder" "${packages[@]}" || return 0
  cp $HERE/with_javascript.mjs "$folder" # Node looks for packages beside the file.
  ask javascript smollm2:135m -- "$folder/node_modules/.bin/node" "$folder/with_javascript.mjs"
}

failed=0
started=()
trap stop EXIT
[[ $# -gt 0 ]] || set -- "${ALL[@]}"
for client in "$@"; do
  check "$client"
done
exit "$failed"
