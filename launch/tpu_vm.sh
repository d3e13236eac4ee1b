#!/usr/bin/env bash
# A Cloud TPU slice from nothing to a run that continues:
#
#   bash launch/tpu_vm.sh create NAME --topology v5e:4x4 [--spot]    ask for the slice as a queued resource
#   bash launch/tpu_vm.sh status NAME                                has it come yet?
#   bash launch/tpu_vm.sh setup NAME [--bucket BUCKET] [--data FOLDER]...
#                                                                    copy the repository, install a Python and the package on all hosts
#   bash launch/tpu_vm.sh run NAME CONFIG [training options]         start, or continue, training on all hosts; returns at once
#   bash launch/tpu_vm.sh logs NAME                                  the last lines of every host's log
#   bash launch/tpu_vm.sh stop NAME                                  finish the step and save
#   bash launch/tpu_vm.sh fetch NAME FOLDER                          copy the remote work folder FOLDER here (of one host)
#   bash launch/tpu_vm.sh delete NAME
#
# Options: --zone ZONE, --project PROJECT (those of gcloud's configuration by default), --dry-run (print the commands instead).
# Several hosts need one work folder that all see: with --bucket the Cloud Storage bucket is mounted as ~/shared on each; give
# `--run.workdir ../shared/NAME`. What is copied is the last commit and, into the same place, each FOLDER of --data: prompts, which git does
# not have, named from the repository as the config names them. HF_TOKEN and LIBTPU_INIT_ARGS are passed on if they are set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/dry_run.sh
source launch/slices.sh

action=${1:-} name=${2:-}
case $action in
  create | status | setup | run | logs | stop | fetch | delete) ;;
  -h | --help | "") usage "${BASH_SOURCE[0]}"; exit 0 ;;
  *) fail "unknown action $action; see --help" ;;
esac
[[ -n $name && $name != -* ]] || fail "$action needs the name of the slice"
shift 2

topology="" bucket="" spot=() place=() data=() rest=()
while (($#)); do
  case $1 in
    --topology) topology=$2; shift ;;
    --bucket) bucket=$2; shift ;;
    --data) data+=("$2"); shift ;;
    --spot) spot=(--spot) ;;
    --zone | --project) place+=("$1=$2"); shift ;;
    --dry-run) dry_run=1 ;;
    *) rest+=("$1") ;;
  esac
  shift
done

on_all_hosts() { # command
  run gcloud compute tpus tpu-vm ssh "$name" "${place[@]}" --worker=all --ssh-flag="-o ServerAliveInterval=30" --command="$1"
}

[[ $action == run || $action == fetch ]] || ((${#rest[@]} == 0)) || fail "$action: unknown option ${rest[0]}; see --help"

case $action in
  create)
    read_slice "$topology"
    # shellcheck disable=SC2154 # read_slice sets them
    run gcloud compute tpus queued-resources create "$name" --node-id="$name" "${place[@]}" \
      --accelerator-type="$type" --runtime-version="$runtime" "${spot[@]}"
    ;;
  status) run gcloud compute tpus queued-resources describe "$name" "${place[@]}" --format="value(state.state)" ;;
  setup)
    for folder in "${data[@]}"; do
      [[ $folder != /* && /$folder/ != */../* ]] ||
        fail "--data $folder: name it from the repository, as the config does, such as flow_grpo/dataset"
      [[ -e $folder ]] || fail "--data $folder: it is not in $PWD; docs/data.md says where prompts come from"
    done
    archives=(densegrpo.tar.gz)
    run git archive --format=tar.gz --output="/tmp/${archives[0]}" HEAD
    if ((${#data[@]})); then
      archives+=(densegrpo-data.tar.gz)
      run tar -czf "/tmp/${archives[1]}" --exclude=.git "${data[@]}"
    fi
    unpack="mkdir -p densegrpo"
    for archive in "${archives[@]}"; do
      run gcloud compute tpus tpu-vm scp "/tmp/$archive" "$name:$archive" "${place[@]}" --worker=all
      unpack+=" && tar xzf $archive -C densegrpo"
    done
    # The images come with Python 3.10: uv brings a later one.
    on_all_hosts "$unpack && cd densegrpo &&\
 curl -LsSf https://astral.sh/uv/install.sh | sh && ~/.local/bin/uv venv --allow-existing --python 3.12 .venv &&\
 ~/.local/bin/uv pip install --python .venv/bin/python --editable '.[tpu,ocr]'"
    if [[ -n $bucket ]]; then
      # Folders are renamed when a checkpoint is complete; gcsfuse does that for so many files at most. What one host writes the others must
      # see at once: by default gcsfuse remembers for a minute what files there are, and on large machines for ever.
      on_all_hosts "mkdir -p ~/shared && (command -v gcsfuse || (export GCSFUSE_REPO=gcsfuse-\$(lsb_release -c -s) &&\
 echo \"deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt \$GCSFUSE_REPO main\" |\
 sudo tee /etc/apt/sources.list.d/gcsfuse.list && curl -s https://packages.cloud.google.com/apt/doc/apt-key.gpg |\
 sudo tee /usr/share/keyrings/cloud.google.asc >/dev/null && sudo apt-get update -q && sudo apt-get install -qy gcsfuse)) &&\
 (mountpoint -q ~/shared || gcsfuse --implicit-dirs --rename-dir-limit=100000 --metadata-cache-ttl-secs=0\
 --metadata-cache-negative-ttl-secs=0 $(printf '%q' "$bucket") ~/shared)"
    fi
    ;;
  run)
    [[ -n ${rest[0]:-} && ${rest[0]} != -* ]] || fail "run needs a config, such as sd35_medium_pickscore, before the training options"
    [[ " ${rest[*]}" == *" --run.workdir"* ]] ||
      echo "warning: no --run.workdir: on several hosts it must be a folder that all see, such as ../shared/$name after setup --bucket" >&2
    token=${HF_TOKEN:+HF_TOKEN=$(printf '%q' "$HF_TOKEN") }
    ((dry_run)) && token=${HF_TOKEN:+'HF_TOKEN=... '}
    flags=${LIBTPU_INIT_ARGS:+LIBTPU_INIT_ARGS=$(printf '%q' "$LIBTPU_INIT_ARGS") }
    train=$(printf '%q ' train "${rest[0]}" --parallel.coordinator cluster "${rest[@]:1}")
    on_all_hosts "cd densegrpo && mkdir -p logs && (${token}${flags}setsid nohup .venv/bin/densegrpo ${train% }\
 >>logs/\$(hostname).log 2>&1 </dev/null & echo \$! >logs/pid) && echo \$(hostname) started"
    ;;
  logs) on_all_hosts "cd densegrpo && tail -n 20 logs/\$(hostname).log" ;;
  stop) on_all_hosts "cd densegrpo && kill -TERM \$(cat logs/pid)" ;;
  fetch)
    ((${#rest[@]} == 1)) || fail "fetch needs the remote work folder, such as runs/sd35_medium_pickscore"
    run gcloud compute tpus tpu-vm scp --recurse "$name:densegrpo/${rest[0]}" . "${place[@]}" --worker=0
    ;;
  delete) run gcloud compute tpus queued-resources delete "$name" "${place[@]}" --force --quiet ;;
esac
