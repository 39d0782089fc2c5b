#!/usr/bin/env bash
# Start the ranks of one pipedec run over plain ssh, in the order of the hosts given, and stop all of them when one ends or
# this script does (Ctrl-C, kill, a closed terminal).
set -euo pipefail

usage() {
    cat >&2 <<'USAGE'
usage: launch/ssh.sh HOST=DEVICES... -- RANK FLAGS...

  HOST=DEVICES   a host and the GPUs to use there, e.g. server-1=0,1,2,3. Ranks are numbered in this order: the first device
                 of the first host is rank 0 (draft and coordinator), then come stages 1..n. A host may be given twice.
  RANK FLAGS     go to pipedec.cluster.torchrun; --redis, --run and --stages are added here.

environment: PIPEDEC_REDIS_URL (needed), PIPEDEC_REDIS_PASSWORD, RUN (name of the run), DIRECTORY (working directory on every
host, default: this one), PYTHON (interpreter on every host, default: python3), MASTER_ADDR (default: first host),
MASTER_PORT (default: 29500).

example (the paper's 14 stages, the draft on an L40 of server-4):
  launch/ssh.sh server-4=3 server-1=0,1,2,3,4,5,6 server-2=0,1,2,3,4,5,6 -- --config cluster.yaml --partition paper-14
USAGE
    exit 2
}

places=()
while (($#)) && [[ $1 != -- ]]; do
    [[ $1 =~ ^[A-Za-z0-9@._-]+=[0-9]+(,[0-9]+)*$ && $1 != -* ]] || usage
    places+=("$1")
    shift
done
((${#places[@]})) && [[ ${1:-} == -- ]] || usage
shift
: "${PIPEDEC_REDIS_URL:?set PIPEDEC_REDIS_URL to the address of Redis, e.g. redis://server-1:6379/0}"
if [[ $PIPEDEC_REDIS_URL == *:*:*@* ]]; then
    echo "PIPEDEC_REDIS_URL holds a password, which command lines would show: use PIPEDEC_REDIS_PASSWORD" >&2
    exit 2
fi

count_devices() {
    local commas=${1//[^,]/}
    echo $((${#commas} + 1))
}

world_size=0
for place in "${places[@]}"; do
    world_size=$((world_size + $(count_devices "${place#*=}")))
done
first_host=${places[0]%%=*}
run=${RUN:-ssh-$(date +%Y%m%d-%H%M%S)}
directory=${DIRECTORY:-$PWD}
python=${PYTHON:-python3}

# What every host runs. Its standard input brings the password (so that no command line and no log holds it) and then stays
# open for as long as this script lives: its end stops the ranks, even when the script was killed with -9. torchrun gets a
# time to end its ranks.
read -r -d '' remote_script <<'REMOTE' || true
IFS= read -r PIPEDEC_REDIS_PASSWORD
if [ -n "$PIPEDEC_REDIS_PASSWORD" ]; then export PIPEDEC_REDIS_PASSWORD; else unset PIPEDEC_REDIS_PASSWORD; fi
export CUDA_VISIBLE_DEVICES="$1" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
cd "$2" || exit 2
shift 2
exec 3<&0
"$@" </dev/null 3<&- &
ranks=$!
{ while read -r _; do :; done; kill "$ranks"; } <&3 >/dev/null 2>&1 &
watcher=$!
wait "$ranks"
code=$?
kill "$watcher" 2>/dev/null
exit "$code"
REMOTE

# One word for the shell on the other side.
quote() {
    printf "'%s' " "${1//\'/\'\\\'\'}"
}

# start NUMBER PLACE RANK-FLAG...: the ranks of one host, in the background. The static rendezvous numbers ranks by
# --node-rank; c10d would sort the hosts by name.
start() {
    local number=$1 host=${2%%=*} devices=${2#*=} command word fd
    shift 2
    command="sh -c $(quote "$remote_script")"
    for word in pipedec-rank "$devices" "$directory" "$python" -m torch.distributed.run \
        --nnodes "${#places[@]}" --node-rank "$number" --nproc-per-node "$(count_devices "$devices")" \
        --rdzv-backend static --master-addr "$master_address" --master-port "${MASTER_PORT:-29500}" \
        -m -- pipedec.cluster.torchrun --redis "$PIPEDEC_REDIS_URL" --run "$run" --stages $((world_size - 1)) "$@"; do
        command+=" $(quote "$word")"
    done
    mkfifo "$scratch/$number"
    (
        for fd in "${inputs[@]}"; do exec {fd}>&-; done
        exec ssh -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=3 "$host" "$command" <"$scratch/$number"
    ) &
    exec {fd}<>"$scratch/$number"
    inputs+=("$fd")
    printf '%s\n' "${PIPEDEC_REDIS_PASSWORD:-}" >&"$fd"
}

stop_all() {
    local fd
    trap - EXIT INT TERM HUP
    for fd in "${inputs[@]}"; do exec {fd}>&-; done
    wait
    rm -rf "$scratch"
}

inputs=()
scratch=$(mktemp -d)
master_address=${MASTER_ADDR:-${first_host#*@}}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

echo "run $run: $((world_size - 1)) stages on ${#places[@]} hosts"
for number in "${!places[@]}"; do
    start "$number" "${places[$number]}" "$@"
done
# Ranks that end well are waited for, one after another; the first that fails ends the run.
for _ in "${places[@]}"; do
    wait -n
done
