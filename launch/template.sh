# shellcheck shell=bash
# Sourced: fills in the words between @ of a YAML file.

quote() { printf '"%s"' "$(printf '%s' "$1" | sed 's/[\\"]/\\&/g')"; } # as a YAML string

fill() { # file, then word value ...
  local file=$1 script=""
  shift
  while (($#)); do
    script+="s|@$1@|$(printf '%s' "$2" | sed 's/[\\|&]/\\&/g')|g;"
    shift 2
  done
  sed "$script" "$file"
}
