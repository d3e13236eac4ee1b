#!/usr/bin/env bash
# A training run on a TPU slice of a GKE cluster, as a JobSet:
#
#   bash launch/gke.sh NAME --topology v5e:4x4 --image IMAGE --bucket BUCKET [--account KSA] [--dry-run] CONFIG [training options]
#
# The image is made by `docker build -f launch/Dockerfile --build-arg EXTRA=tpu -t IMAGE .`. The bucket is mounted at /shared on all hosts, and
# the work folder is /shared/NAME. KSA is the Kubernetes account that may use the bucket ("default" if not given). Preempted, the run saves and
# is started again; to end it, `kubectl delete jobset NAME`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh

[[ ${1:-} == -h || ${1:-} == --help || $# == 0 ]] && { usage "${BASH_SOURCE[0]}"; exit 0; }
name=$1 topology="" image="" bucket="" account=default
shift
[[ $name =~ ^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$ ]] || fail "name $name: small letters, digits and hyphens, as Kubernetes wants it"
while (($#)); do
  case $1 in
    --topology) topology=$2; shift ;;
    --image) image=$2; shift ;;
    --bucket) bucket=$2; shift ;;
    --account) account=$2; shift ;;
    --dry-run) dry_run=1 ;;
    -*) fail "unknown option $1; options of the trainer stand after the config" ;;
    *) break ;;
  esac
  shift
done
[[ -n $image && -n $bucket ]] || fail "--image and --bucket are needed"
(($#)) || fail "name a config, such as sd35_medium_pickscore"

case $topology in
  v4:*x*x*) accelerator=tpu-v4-podslice ;;
  v5p:*x*x*) accelerator=tpu-v5p-slice ;;
  v5e:*x*) accelerator=tpu-v5-lite-podslice ;;
  v6e:*x*) accelerator=tpu-v6e-slice ;;
  *) fail "--topology ${topology:-?}: write it as plan does, such as v5e:4x4 or v5p:2x2x1" ;;
esac
shape=${topology#*:}
all=$((${shape//x/*}))
chips=4 # of a host; small v5e and v6e slices have one host
case $topology in v5e:*|v6e:*) ((all <= 8)) && chips=$all ;; esac
hosts=$((all / chips))

quote() { printf '"%s"' "$(printf '%s' "$1" | sed 's/[\\"]/\\&/g')"; }
arguments="[$(for word in "$@" --run.workdir "/shared/$name"; do quote "$word"; printf ', '; done | sed 's/, $//')]"
fill() { # word value ...
  local script=""
  while (($#)); do
    script+="s|@$1@|$(printf '%s' "$2" | sed 's/[\\|&]/\\&/g')|g;"
    shift 2
  done
  sed "$script" launch/gke_jobset.yaml
}
manifest=$(fill NAME "$name" HOSTS "$hosts" CHIPS "$chips" ACCELERATOR "$accelerator" SHAPE "$shape" IMAGE "$image" BUCKET "$bucket" \
  ACCOUNT "$account" ARGUMENTS "$arguments")
if ((dry_run)); then
  echo "$manifest"
else
  kubectl apply -f - <<<"$manifest"
  echo "kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=$name --max-log-requests $hosts"
fi
