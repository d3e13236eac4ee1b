#!/usr/bin/env bash
# A training run on a TPU slice of a GKE cluster, as a JobSet:
#
#   bash launch/gke.sh NAME --topology v5e:4x4 --image IMAGE --bucket BUCKET [--account KSA] [--dry-run] CONFIG [training options]
#
# The image is made by `docker build -f launch/Dockerfile --build-arg EXTRA=tpu -t IMAGE .`, with the prompts in it that lie in this folder.
# The bucket is mounted at /shared on all hosts, and the work folder is /shared/NAME. KSA is the Kubernetes account that may use the bucket
# ("default" if not given). LIBTPU_INIT_ARGS is passed on if it is set.
#
# Where a node is drained the run has ten minutes to finish its step and save. A spot node ends about 30 seconds after its notice, whatever
# the pod asks for: up to run.save_every steps are lost. Either way the run is started again and continues; one that was refused for bad
# input, or stopped itself, is not. To end it, `kubectl delete jobset NAME`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/slices.sh
source launch/template.sh

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
no_dry_run_after "$@"

read_slice "$topology"
# shellcheck disable=SC2154 # read_slice sets them
case $kind in
  v4) accelerator=tpu-v4-podslice ;;
  v5p) accelerator=tpu-v5p-slice ;;
  v5e) accelerator=tpu-v5-lite-podslice ;;
  v6e) accelerator=tpu-v6e-slice ;;
esac

arguments="[$(for word in "$@" --run.workdir "/shared/$name"; do quote "$word"; printf ', '; done | sed 's/, $//')]"
flags=""
[[ -z ${LIBTPU_INIT_ARGS:-} ]] || flags="- {name: LIBTPU_INIT_ARGS, value: $(quote "$LIBTPU_INIT_ARGS")}"
# shellcheck disable=SC2154
manifest=$(fill launch/gke_jobset.yaml NAME "$name" HOSTS "$hosts" CHIPS $((chips / hosts)) ACCELERATOR "$accelerator" SHAPE "$shape" \
  IMAGE "$image" BUCKET "$bucket" ACCOUNT "$account" ARGUMENTS "$arguments" FLAGS "$flags")
if ((dry_run)); then
  echo "$manifest"
else
  kubectl apply -f - <<<"$manifest"
  echo "kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=$name -c train --max-log-requests $hosts"
fi
