# shellcheck shell=bash
# Functions for the scripts here: find a Python, make a virtual environment, install. Sourced, not run.

find_python() { # [preferred] -> path of a Python >= 3.11, or an error that says what to do
  local candidate
  for candidate in ${1:+"$1"} python3.11 python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
    if [[ -n ${1:-} && $candidate == "$1" ]]; then
      echo "$1 is not a Python >= 3.11 with the venv module" >&2
      return 1
    fi
  done
  echo "no Python >= 3.11 with the venv module was found; install one (for example python3.11 and python3.11-venv) and try again" >&2
  return 1
}

install_into() { # venv python requirement: creates the environment once, and installs again when setup.py has changed
  local venv=$1 python=$2 requirement=$3 stamp
  stamp="$requirement $(cksum <setup.py)"
  if [[ ! -x $venv/bin/python ]]; then
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
  fi
  if [[ "$(cat "$venv/installed" 2>/dev/null)" != "$stamp" ]]; then
    echo "installing $requirement (a few minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$requirement"
    echo "$stamp" >"$venv/installed"
  fi
}

tune_allocator() { # on Linux: glibc keeps freed memory instead of returning it after every step, some percent of the time on CPU
  if [[ $(uname) == Linux && -z ${GLIBC_TUNABLES:-} ]]; then
    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736:glibc.malloc.arena_max=1
  fi
}
