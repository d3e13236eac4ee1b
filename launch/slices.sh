# shellcheck shell=bash disable=SC2034
# Sourced, with dry_run.sh: which TPU slices there are, and what Google Cloud calls them. The variables are for who sources this.

# v5e:4x4 -> sets kind, shape, chips, hosts, and as Google Cloud names them type and runtime; or fails with the slices that there are.
read_slice() {
  local flat="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16" small="2x2x1 2x2x2 2x2x4 2x4x4" a b c
  [[ $1 =~ ^(v4|v5e|v5p|v6e):[1-9][0-9]*(x[1-9][0-9]*)+$ ]] ||
    fail "--topology ${1:-?}: write it as plan does, such as v5e:4x4 or v5p:2x2x1"
  kind=${1%%:*} shape=${1#*:}
  chips=$((${shape//x/*}))
  if [[ $kind == v5e || $kind == v6e ]]; then
    [[ " $flat " == *" $shape "* ]] || fail "--topology $1: there is no such slice; of $kind choose one of $flat"
  elif [[ " $small " != *" $shape "* ]]; then
    IFS=x read -r a b c <<<"$shape"
    if [[ ! $shape =~ ^[0-9]+x[0-9]+x[0-9]+$ ]] || ((a % 4 || b % 4 || c % 4 || a > b || b > c)); then
      fail "--topology $1: there is no such slice; of $kind choose one of $small, or three multiples of 4 in rising order such as 4x4x8"
    fi
  fi
  hosts=$((chips / 4))
  [[ $shape == *x*x* ]] || ((chips > 8)) || hosts=1
  case $kind in # v4 and v5p are counted in cores, two a chip
    v4) type=v4-$((2 * chips)) runtime=tpu-ubuntu2204-base ;;
    v5p) type=v5p-$((2 * chips)) runtime=v2-alpha-tpuv5 ;;
    v5e) type=v5litepod-$chips runtime=v2-alpha-tpuv5-lite ;;
    v6e) type=v6e-$chips runtime=v2-alpha-tpuv6e ;;
  esac
}
