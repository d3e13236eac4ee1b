#!/usr/bin/env bash
# What wants to be known of a GPU: tests that differ there, the quickstart, and the full-size phases against diffusers in torch.
#
#   bash benchmarks/gpu_check.sh [--dry-run] [OUT]        results go to OUT, runs/gpu_check by default; about 15 minutes after installing
#
# Needs an NVIDIA driver, Python >= 3.11 and the package index. Every part is tried, and the exit code is that of the worst.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
source launch/environment.sh
source launch/dry_run.sh
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage "${BASH_SOURCE[0]}"; exit 0; }
[[ ${1:-} == --dry-run ]] && dry_run=1 && shift
out=${1:-runs/gpu_check}
venv=${DENSEGRPO_VENV:-.venv-gpu}
worst=0

part() { # name command ...
  echo "== $1"
  run "${@:2}" || { worst=1; echo "$1 failed"; }
}

if ((dry_run)); then
  echo "# $venv: pip install --editable .[cuda12,test] diffusers"
else
  install_into "$venv" "$(find_python "")" ".[cuda12,test]"
  mkdir -p "$out"
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv | tee "$out/gpu.csv"
fi
export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.92} DENSEGRPO_VENV=$venv
python=$venv/bin/python
part "JAX sees the GPU" env JAX_PLATFORMS=cuda,cpu "$python" -c "import jax; assert jax.default_backend() == 'gpu', jax.devices(); print(jax.devices())"
# On the GPU, where products of float32 are TF32's and sums come in any order unless they are told otherwise.
part "tests" env JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION=highest XLA_FLAGS=--xla_gpu_deterministic_ops=true \
  "$python" -m pytest -q -p no:cacheprovider tests/models/test_attention.py tests/flow tests/objective tests/train/test_toy.py
part "quickstart" env JAX_PLATFORMS=cuda bash launch/quickstart.sh --run.steps 10 --run.workdir "$out/quickstart"
# JAX and torch share the memory of one GPU in this part.
part "full size" env XLA_CLIENT_MEM_FRACTION=0.6 "$python" benchmarks/full_size.py --json "$out/full_size.json"
part "plan" "$venv/bin/densegrpo" plan sd35_medium_pickscore --topology h200:1 --search
exit "$worst"
