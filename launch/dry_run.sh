# shellcheck shell=bash
# Sourced: `run` carries out a command, or with dry_run=1 prints it as it could be typed.

dry_run=${dry_run:-0}

run() {
  local word line=""
  if ((!dry_run)); then
    "$@"
    return
  fi
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=@%+,~-]+$ ]] || word=${word@Q}
    line+="$word "
  done
  echo "${line% }"
}

usage() { # script: its first comment
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"
}

fail() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

no_dry_run_after() { # training options: what is to be a dry run must not begin in earnest
  local word
  for word in "$@"; do
    [[ $word != --dry-run ]] || fail "--dry-run stands before the config; what follows it goes to the trainer"
  done
}
