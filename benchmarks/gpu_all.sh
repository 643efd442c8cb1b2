#!/usr/bin/env bash
# Runs the benchmarks of the GPU backend, part by part: each prints tables for docs/notes/gpu-figures.md. On the machine with the
# GPU, which should have nothing else to do. Needs Python with NumPy, torch and triton, and for the comparison transformers.
#
#   benchmarks/gpu_all.sh [FOLDER]        results go to build/gpu, or FOLDER
#
# A part whose result is there, and is not of a self-test, is not measured again: what was cut off goes on with the next call. From
# the environment: PYTHON (.venv/bin/python, or python3 where that is not there); ONLY, a pattern of the parts' names, such as
# "step-*"; AGAIN=1, which measures also what is there; MINUTES, after which no other part is begun; ARGS, for every part that runs:
# "--self-test", or what all of them take, such as ARGS=--no-peer ONLY="serve-*". A part that fails is named at the end.
set -u -o pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
folder=${1:-build/gpu}
mkdir -p "$folder"
"$python" -c 'from penstock import __version__' 2>/dev/null || export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
failed=() left=()

# has_result FILE: whether it is there, and not of a self-test
has_result() {
  [ -f "$1" ] && ! grep -q '"is_self_test": true' "$1"
}

# run NAME SCRIPT ARGUMENT...
run() {
  local name=$1 script=$2
  shift 2
  local result=$folder/$name.txt
  # shellcheck disable=SC2254,SC2086  # ONLY is a pattern, ARGS several arguments
  case $name in ${ONLY:-*})
    if has_result "$result" && [ -z "${AGAIN:-}" ]; then
      echo "== $name: there already"
    elif [ -n "${MINUTES:-}" ] && [ $SECONDS -ge $((60 * ${MINUTES:-0})) ]; then
      left+=("$name")
    else
      echo "== $name: $script $* ${ARGS:-}"
      if "$python" -u "benchmarks/$script" "$@" ${ARGS:-} | tee "$folder/$name.part"; then
        mv "$folder/$name.part" "$result"
      else
        failed+=("$name")
      fi
    fi
    ;;
  esac
}

# In the order of what is learned per minute.
run peaks gpu_peaks.py
run step-8b gpu_step.py --shapes 8b
run serve-8b gpu_serve.py --shapes 8b
run attention-8b gpu_attention.py --models llama-8b --modes default
run gemm-8b gpu_gemm.py --models llama-8b --modes default
run step-8b-fp8 gpu_step.py --shapes 8b --format F8_E4M3 --depths 2
run step-8b-int4 gpu_step.py --shapes 8b --format Q4_0 --depths 2
run step-8b-int8 gpu_step.py --shapes 8b --format Q8_0 --depths 2
run step-8b-deterministic gpu_step.py --shapes 8b --deterministic --depths 2
run step-8b-sampling gpu_step.py --shapes 8b --depths 2 --sampling nucleus penalties masks --steps 1x1@1024 64x1@1024 256x1@1024
run serve-135m gpu_serve.py --shapes 135m
run serve-1.5b gpu_serve.py --shapes 1.5b
run step-135m gpu_step.py --shapes 135m
run step-1.5b gpu_step.py --shapes 1.5b
run attention-1.5b gpu_attention.py --models qwen2.5-1.5b --modes default
run attention-135m gpu_attention.py --models smollm2-135m --modes default
run gemm-1.5b gpu_gemm.py --models qwen2.5-1.5b --modes default
run gemm-135m gpu_gemm.py --models smollm2-135m --modes default
run attention-8b-deterministic gpu_attention.py --models llama-8b --modes deterministic
run gemm-8b-deterministic gpu_gemm.py --models llama-8b --modes deterministic

if [ ${#left[@]} -gt 0 ]; then echo "left for the next call: ${left[*]}"; fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
