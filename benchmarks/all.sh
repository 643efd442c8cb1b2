#!/usr/bin/env bash
# Runs most benchmarks of docs/performance.md, one after the other: not encoder_peers.py, experts.py, packed.py and long_context.py.
# Each writes the tables that stand there; `http` writes JSON. Over an hour on two cores, which should have nothing else to do.
#
#   make install && benchmarks/all.sh [FOLDER]        results go to build/results, or FOLDER
#
# From the environment: PYTHON (.venv/bin/python); QWEN, the GGUF file of Qwen2.5-Coder-1.5B-Instruct Q4_K_M, without which its part
# is left out; PEERS_ARGS, for peers.py, such as "--setup"; ONLY, a pattern of the results' names, such as "step-*".
# A benchmark that fails is named at the end.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=${1:-build/results}
mkdir -p "$folder"
failed=()

# run NAME SCRIPT ARGUMENT...
run() {
  local name=$1 script=$2
  shift 2
  # shellcheck disable=SC2254  # ONLY is a pattern
  case $name in ${ONLY:-*})
    echo "== $name: $script $*"
    if "$python" "benchmarks/$script" "$@" >"$folder/$name.part"; then
      mv "$folder/$name.part" "$folder/$name.md"
    else
      failed+=("$name")
    fi
    ;;
  esac
}

# http: the same requests over HTTP and without it
http() {
  local penstock load port
  penstock=("$python" -m penstock)
  load=(--input-tokens 100 --output-tokens 100 --requests 64 --concurrency 8,32 --repeat 3)
  port=$("$python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
  "${penstock[@]}" serve --no-prefix-caching --port "$port" &
  local server=$! status=0
  until curl -sf "localhost:$port/ready" >/dev/null; do
    kill -0 $server || return 1
    sleep 0.2
  done
  "${penstock[@]}" bench --url "http://127.0.0.1:$port" "${load[@]}" --json "$folder/http.json" || status=1
  kill $server
  wait $server
  "${penstock[@]}" bench --in-process smollm2:135m --no-prefix-caching "${load[@]}" --json "$folder/in-process.json" || status=1
  return $status
}

run peaks peaks.py
run scheduler scheduler.py
run startup startup.py
run installed installed.py
run streaming streaming.py
run pipeline pipeline.py
# shellcheck disable=SC2254  # ONLY is a pattern
case http in ${ONLY:-*}) http || failed+=(http) ;; esac
variants=$("$python" -c 'from penstock.backends.native._native import usable_variants as u; print(*u())')
first=${variants%% *}
for variant in $variants; do
  if [ "$variant" = portable ]; then # thirty times slower
    run "kernels-$variant" kernels.py --variant "$variant" --models smollm2 --kinds q4_1 q8_0 --rows 1,8,32 --seconds 0
    run "step-$variant" step.py --variant "$variant" --steps 1x1@128 8x1@200 32x1@256 1x512@0 --rounds 3
  else
    run "kernels-$variant" kernels.py --variant "$variant"
    run "attention-$variant" attention.py --variant "$variant"
    run "step-$variant" step.py --variant "$variant"
  fi
done
if [ -n "${QWEN:-}" ]; then run step-qwen step.py --variant "$first" --model "$QWEN" --steps 1x1@128 16x1@256 1x512@0; fi
# shellcheck disable=SC2086  # several arguments
{
  run peers-sharegpt peers.py ${PEERS_ARGS:-}
  run peers-azure peers.py --workload azure ${PEERS_ARGS:-}
  run peers-short peers.py --workload short ${PEERS_ARGS:-}
  run peers-long peers.py --workload long ${PEERS_ARGS:-}
  if [ -n "${QWEN:-}" ]; then
    run peers-qwen peers.py --model qwen --model-file "$QWEN" ${PEERS_ARGS:-}
    run peers-qwen-long peers.py --model qwen --model-file "$QWEN" --workload long ${PEERS_ARGS:-}
  fi
  # Are the peers at their best with the settings that the other runs give them?
  run peers-settings peers.py ${PEERS_ARGS:-} --repeat 1 --peers openvino "openvino INFERENCE_NUM_THREADS=1" \
    "openvino ENABLE_CPU_PINNING=false" "openvino TBB_PARTITIONER=STATIC" "openvino PERFORMANCE_HINT=THROUGHPUT" \
    "openvino INFERENCE_PRECISION_HINT=f32" "openvino max_num_batched_tokens=256" "openvino max_num_batched_tokens=2048" \
    "openvino KV_CACHE_PRECISION=bf16" vllm \
    "vllm VLLM_CPU_NUM_OF_RESERVED_CPU=0 LD_PRELOAD=$PWD/build/peers/vllm/lib/libiomp5.so" llamacpp "llamacpp -ctk q8_0 -ctv q8_0"
}

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
