#!/usr/bin/env bash
# Starts the ranks of one pipedec run over ssh, in the order of the given hosts. Stops all of them when one fails or this script
# ends (Ctrl-C, kill, a closed terminal).
set -euo pipefail

usage() {
    cat >&2 <<'USAGE'
usage: launch/ssh.sh HOST=DEVICES... -- RANK FLAGS...

  HOST=DEVICES   a host and the GPUs to use there, e.g. server-1=0,1,2,3. Ranks are numbered in this order: the first device
                 of the first host is rank 0 (draft and coordinator), followed by stages 1..n. A host may occur twice.
  RANK FLAGS     flags of pipedec.cluster.torchrun; the script adds --redis, --run and --stages.

environment: PIPEDEC_REDIS_URL (required), PIPEDEC_REDIS_PASSWORD, RUN (name of the run), DIRECTORY (working directory on every
host, default: the current one), PYTHON (interpreter on every host, default: python3), MASTER_ADDR (default: first host),
MASTER_PORT (default: 29500).

example (the paper's 14 stages, the draft on an L40 of server-4):
  launch/ssh.sh server-4=3 server-1=0,1,2,3,4,5,6 server-2=0,1,2,3,4,5,6 -- --config cluster.yaml --partition paper-14
USAGE
    exit 2
}

host_specs=()
while (($#)) && [[ $1 != -- ]]; do
    [[ $1 =~ ^[A-Za-z0-9@._-]+=[0-9]+(,[0-9]+)*$ && $1 != -* ]] || usage
    host_specs+=("$1")
    shift
done
((${#host_specs[@]})) && [[ ${1:-} == -- ]] || usage
shift
: "${PIPEDEC_REDIS_URL:?set PIPEDEC_REDIS_URL to the address of Redis, e.g. redis://server-1:6379/0}"
if [[ $PIPEDEC_REDIS_URL == *:*:*@* ]]; then
    echo "PIPEDEC_REDIS_URL contains a password, which command lines would show: set PIPEDEC_REDIS_PASSWORD instead" >&2
    exit 2
fi

count_devices() {
    local commas=${1//[^,]/}
    echo $((${#commas} + 1))
}

world_size=0
for spec in "${host_specs[@]}"; do
    world_size=$((world_size + $(count_devices "${spec#*=}")))
done
first_host=${host_specs[0]%%=*}
run=${RUN:-ssh-$(date +%Y%m%d-%H%M%S)}
directory=${DIRECTORY:-$PWD}
python=${PYTHON:-python3}

# The script that every host runs. It reads the password from standard input, so that no command line or log contains it.
# Standard input then stays open until this script ends, which stops the ranks even if this script was killed with SIGKILL.
# torchrun gets SIGTERM, so that it can stop its ranks.
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

# Quotes one word for the remote shell.
quote() {
    printf "'%s' " "${1//\'/\'\\\'\'}"
}

# start NUMBER HOST=DEVICES RANK-FLAG...: starts the ranks of one host in the background. The static rendezvous numbers ranks by
# --node-rank; c10d would sort the hosts by name.
start() {
    local number=$1 host=${2%%=*} devices=${2#*=} command word fd
    shift 2
    command="sh -c $(quote "$remote_script")"
    for word in pipedec-rank "$devices" "$directory" "$python" -m torch.distributed.run \
        --nnodes "${#host_specs[@]}" --node-rank "$number" --nproc-per-node "$(count_devices "$devices")" \
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

echo "run $run: $((world_size - 1)) stages on ${#host_specs[@]} hosts"
for number in "${!host_specs[@]}"; do
    start "$number" "${host_specs[$number]}" "$@"
done
# Waits for all hosts; the first one that fails ends this script and with it the run.
for _ in "${host_specs[@]}"; do
    wait -n
done
