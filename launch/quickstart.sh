#!/usr/bin/env bash
# From nothing to a trained adapter and a report, on two CPU cores, in one command:
#
#   bash launch/quickstart.sh [--python PYTHON] [training options, such as --run.steps 20]
#
# Needs Python >= 3.11 and the package index. The environment is .venv; DENSEGRPO_VENV names another place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

python=""
arguments=()
while (($#)); do
  case $1 in
    --python) python=$2; shift ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

python=$(find_python "$python")
venv=${DENSEGRPO_VENV:-.venv}
install_into "$venv" "$python" .

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
tune_allocator
echo
echo "DenseGRPO on LoRA weights of a tiny Stable Diffusion 3, towards what a small preference model likes. Held-out pictures before and"
echo "after are compared at the end. Ctrl-C saves, and the same command continues."
echo
"$venv/bin/densegrpo" train scenes_preference --run.workdir runs/quickstart "${arguments[@]}"
echo
echo "Open runs/quickstart/report.html in a browser."
echo "Next: $venv/bin/densegrpo train scenes_preference:flow_grpo   (the same without dense rewards; \`densegrpo train\` lists more)"
