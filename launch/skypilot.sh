#!/usr/bin/env bash
# A training run through SkyPilot, on a TPU slice or on GPUs of any of its clouds:
#
#   bash launch/skypilot.sh NAME --topology v6e:2x4 --bucket BUCKET [--spot] [--managed] [--dry-run] CONFIG [training options]
#   bash launch/skypilot.sh NAME --gpus H100:8 [--nodes N] [--cuda 12|13] --bucket BUCKET ... the same
#
# The work folder is NAME in the Cloud Storage bucket, which must exist. NAME is also that of the cluster or, with --managed, of the managed
# job, which SkyPilot starts again after preemption: the run goes on from its last checkpoint. HF_TOKEN and LIBTPU_INIT_ARGS are passed on
# if they are set. --dry-run prints the task and the command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/slices.sh
source launch/template.sh

[[ ${1:-} == -h || ${1:-} == --help || $# == 0 ]] && { usage "${BASH_SOURCE[0]}"; exit 0; }
name=$1 topology="" gpus="" nodes=1 cuda=12 bucket="" spot=false managed=0
shift
[[ $name =~ ^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$ ]] || fail "name $name: small letters, digits and hyphens, as the clouds want it"
while (($#)); do
  case $1 in
    --topology) topology=$2; shift ;;
    --gpus) gpus=$2; shift ;;
    --nodes) nodes=$2; shift ;;
    --cuda) cuda=$2; shift ;;
    --bucket) bucket=$2; shift ;;
    --spot) spot=true ;;
    --managed) managed=1 ;;
    --dry-run) dry_run=1 ;;
    -*) fail "unknown option $1; options of the trainer stand after the config" ;;
    *) break ;;
  esac
  shift
done
[[ -n $bucket ]] || fail "--bucket is needed"
[[ -n $topology && -z $gpus || -z $topology && -n $gpus ]] || fail "give --topology, such as v6e:2x4, or --gpus, such as H100:8"
[[ $nodes =~ ^[1-9][0-9]*$ ]] || fail "--nodes $nodes: a number of machines, 1 or more"
[[ $cuda == 12 || $cuda == 13 ]] || fail "--cuda $cuda: 12 and 13 are possible"
(($#)) || fail "name a config, such as sd35_medium_pickscore"
no_dry_run_after "$@"

if [[ -n $gpus ]]; then
  [[ $gpus =~ ^[A-Za-z0-9-]+:[1-9][0-9]*$ ]] || fail "--gpus $gpus: write the name and the number in each machine, such as H100:8"
  resources="{accelerators: $(quote "$gpus"), use_spot: $spot}" extra=cuda$cuda
else
  ((nodes == 1)) || fail "--nodes $nodes: goes with --gpus; the hosts of a slice are counted by its topology"
  read_slice "$topology"
  # shellcheck disable=SC2154 # read_slice sets them
  resources="{accelerators: tpu-$type, accelerator_args: {tpu_vm: true, runtime_version: $runtime}, use_spot: $spot}" extra=tpu
fi
envs="{}" secrets="{}" secret=()
[[ -z ${LIBTPU_INIT_ARGS:-} ]] || envs="{LIBTPU_INIT_ARGS: $(quote "$LIBTPU_INIT_ARGS")}"
[[ -z ${HF_TOKEN:-} ]] || { secrets="{HF_TOKEN: null}"; secret=(--secret HF_TOKEN); } # sky reads the value from here
arguments=$(printf '%q ' "$@" --run.workdir "/shared/$name")
task=$(fill launch/skypilot.yaml NAME "$name" NODES "$nodes" RESOURCES "$resources" ENVS "$envs" SECRETS "$secrets" BUCKET "gs://$bucket" \
  EXTRA "$extra" ARGUMENTS "${arguments% }")

file=${TMPDIR:-/tmp}/densegrpo-$name.yaml
if ((managed)); then command=(sky jobs launch --name "$name"); else command=(sky launch --cluster "$name"); fi
command+=("${secret[@]}" "$file")
if ((dry_run)); then
  echo "$task"
  echo "# $(run "${command[@]}")"
else
  echo "$task" >"$file"
  run "${command[@]}"
fi
