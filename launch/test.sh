#!/usr/bin/env bash
# Set up a virtual environment and run the tests: all that CI runs, or with --full also what takes longer.
#
#   bash launch/test.sh [--full] [--python PYTHON] [pytest arguments]
#
# Needs Python >= 3.11 and the package index. The environment is .venv-test-<version>; DENSEGRPO_VENV names another place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

select=(-m "not slow")
python=""
arguments=()
while (($#)); do
  case $1 in
    --full) select=() ;;
    --python) python=$2; shift ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) arguments+=("$1") ;;
  esac
  shift
done

python=$(find_python "$python")
venv=${DENSEGRPO_VENV:-.venv-test-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
install_into "$venv" "$python" '.[test]'

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
workers=(-n "${DENSEGRPO_TEST_WORKERS:-2}" --dist worksteal)
exec "$venv/bin/python" -m pytest "${workers[@]}" "${select[@]}" "${arguments[@]}"
