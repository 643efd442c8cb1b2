#!/usr/bin/env bash
# Runs every benchmark, one after the other, and writes the figures into docs/performance.md. Over an hour on two cores, which
# should have nothing else to do.
#
#   make install && benchmarks/all.sh [FOLDER]        results go to build/results, or FOLDER
#
# From the environment: PYTHON (.venv/bin/python); QWEN, the GGUF file of Qwen2.5-Coder-1.5B-Instruct Q4_K_M, without which its part
# is left out; PEERS_ARGS, for peers.py, such as "--setup"; ONLY, a pattern of the results' names, such as "step-*"; ADD=1, which adds
# the rounds of peers.py to those of the result that is there, if the build, the contenders and their settings are the same.
# What is left out keeps its last result in the folder, and what stands on the page. A benchmark that fails is named at the end.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=${1:-build/results}
mkdir -p "$folder"
results=() failed=()

# collect NAME: the result that is there, of this run or an earlier one
collect() {
  if [ -f "$folder/$1.txt" ]; then results+=("$folder/$1.txt"); fi
}

# run NAME SCRIPT ARGUMENT...
run() {
  local name=$1 script=$2
  shift 2
  # shellcheck disable=SC2254  # ONLY is a pattern
  case $name in ${ONLY:-*})
    if [ -n "${ADD:-}" ] && [ "$script" = peers.py ] && [ -f "$folder/$name.txt" ]; then set -- "$@" --add "$folder/$name.txt"; fi
    echo "== $name: $script $*"
    if "$python" "benchmarks/$script" "$@" >"$folder/$name.part"; then
      mv "$folder/$name.part" "$folder/$name.txt"
    else
      failed+=("$name")
    fi
    ;;
  esac
  collect "$name"
}

run peaks peaks.py
run scheduler scheduler.py
run startup startup.py
run inprocess inprocess.py
run streaming streaming.py
run pipeline pipeline.py
variants=$("$python" -c 'from penstock.backends.native._native import usable_variants as u; print(*u())')
first=${variants%% *}
for variant in $variants; do
  if [ "$variant" = "$first" ]; then
    run "kernels-$variant" kernels.py --variant "$variant"
    run "step-$variant" step.py --variant "$variant"
  elif [ "$variant" = portable ]; then # thirty times slower
    run "kernels-$variant" kernels.py --variant "$variant" --models smollm2 --kinds q4_1 q8_0 --rows 1,8,32 --seconds 0 --no-attention
    run "step-$variant" step.py --variant "$variant" --steps 1x1@128 8x1@200 32x1@256 1x512@0 --repeat 3
  else
    run "kernels-$variant" kernels.py --variant "$variant" --kinds q4_1 q8_0 bf16 --rows 1,2,4,8,16,32,64,128 --seconds 0
    run "step-$variant" step.py --variant "$variant"
  fi
done
if [ -n "${QWEN:-}" ]; then run step-qwen step.py --model "$QWEN" --steps 1x1@128 16x1@256 1x512@0; else collect step-qwen; fi
# shellcheck disable=SC2086  # several arguments
{
  run peers-sharegpt peers.py ${PEERS_ARGS:-}
  run peers-azure peers.py --workload azure ${PEERS_ARGS:-}
  run peers-short peers.py --workload short ${PEERS_ARGS:-}
  # Are the peers at their best with the settings that the other runs give them?
  run peers-settings peers.py ${PEERS_ARGS:-} --repeat 1 --title "other settings of the peers" --peers openvino openvino-1-thread \
    openvino-unpinned openvino-static openvino-throughput openvino-f32 openvino-256 openvino-2048 openvino-kv-bf16 vllm vllm-all-cores \
    llamacpp llamacpp-kv-q8
  if [ -n "${QWEN:-}" ]; then run peers-qwen peers.py --model qwen --model-file "$QWEN" ${PEERS_ARGS:-}; else collect peers-qwen; fi
}

if [ ${#results[@]} -gt 0 ]; then "$python" benchmarks/report.py "${results[@]}"; fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
