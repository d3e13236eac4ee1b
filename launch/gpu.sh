#!/usr/bin/env bash
# Train on the GPUs of this machine: makes .venv with JAX for CUDA, and runs.
#
#   bash launch/gpu.sh [--python PYTHON] [--cuda 12|13] [--dry-run] CONFIG [training options]
#
# Needs an NVIDIA driver, Python >= 3.11 and the package index. DENSEGRPO_VENV names another environment. Ctrl-C saves, and the same command
# continues.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
source launch/dry_run.sh

python="" cuda=12
while (($#)); do
  case $1 in
    --python) python=$2; shift ;;
    --cuda) cuda=$2; shift ;;
    --dry-run) dry_run=1 ;;
    -h | --help) usage "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) fail "unknown option $1; options of the trainer stand after the config" ;;
    *) break ;;
  esac
  shift
done
(($#)) || fail "name a config, such as sd35_medium_pickscore"
no_dry_run_after "$@"
[[ $cuda == 12 || $cuda == 13 ]] || fail "--cuda $cuda: 12 and 13 are possible"

venv=${DENSEGRPO_VENV:-.venv}
if ((dry_run)); then
  echo "# $venv: pip install --editable .[cuda$cuda,ocr]"
else
  install_into "$venv" "$(find_python "$python")" ".[cuda$cuda,ocr]"
fi
# JAX takes three quarters of the memory by default; `densegrpo plan` counts with this much.
run env "XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.92}" "$venv/bin/densegrpo" train "$@"
