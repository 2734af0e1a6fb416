#!/usr/bin/env bash
# Build the package from what a CUDA machine has, run the gpu tests and the
# benchmarks there, and write one results file.
#
# Needs no network: Python >= 3.10 with torch (CUDA), cmake, ninja, nanobind,
# scikit-build-core, pytest, typer, rich and pydantic. Usage: scripts/gpu_check.sh [RESULTS_DIR]
# PARTS="tests training": only these of tests, benchmarks and training, in this order.
# SIZE=3b trains a model of 3 billion parameters instead of 1.2 (tiny: to see that it runs). matplotlib draws the
# pictures; LONGSHORE_BENCH_DEEPSPEED_PYTHON names the interpreter that has DeepSpeed, where it is another one.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=${1:-docs/results}
size=${SIZE:-1.2b}
parts=${PARTS:-tests benchmarks training}
for part in $parts; do
    case $part in tests | benchmarks | training) ;; *) echo "gpu_check: no part $part: tests, benchmarks, training" >&2; exit 2 ;; esac
done
mkdir -p "$results" || exit 1

"$python" - <<'PY' || exit 1
import importlib.util, sys
missing = [name for name in ("torch", "cmake", "ninja", "nanobind", "scikit_build_core", "pytest", "typer", "rich", "pydantic")
           if importlib.util.find_spec(name) is None and not __import__("shutil").which(name)]
if missing:
    sys.exit("gpu_check: install first: " + ", ".join(missing))
import torch
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch sees no CUDA device")
print(f"gpu_check: torch {torch.__version__}, {torch.cuda.get_device_name()}")
PY

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" . || exit 1
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"

name=$results/$(date +%F)-$("$python" -c '
import re, torch
print(re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))')
status=0
if ! "$python" -c 'import transformers' 2>/dev/null; then
    echo "gpu_check: transformers is missing; the whole-step benchmark and training are left out"
fi
for part in $parts; do
    case $part in
    tests) # tests/integrations has none of them, and imports packages that few have
        parallel=$("$python" -c 'import xdist; print("-n 6 --dist worksteal")' 2>/dev/null)
        "$python" -m pytest $parallel -m gpu --ignore=tests/integrations --junitxml="$name-tests.xml" -p no:cacheprovider -p no:benchmark || status=1 ;;
    benchmarks)
        "$python" -m benchmarks --out "$results" || status=1 ;;
    training) # beside no offload, DeepSpeed, torchao and FSDP2, where they are installed: some 8 minutes on an H200
        "$python" -m benchmarks.gpu --size "$size" --out "$results" || status=1 ;;
    esac
done
if [ $status = 0 ]; then echo "gpu_check: passed; results in $results"; else echo "gpu_check: FAILED"; fi
exit $status
