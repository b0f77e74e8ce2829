#!/usr/bin/env bash
# A real network of N hosts on one machine: N network namespaces on a bridge, every port limited to RATE in both directions (tc tbf).
# Usage: PYTHON=.venv/bin/python net_lab.sh N RATE SCRIPT [OUT]      RATE as tc writes it: 200mbit, 1gbit
# With OUT each rank runs under `etloom collect --out OUT --steps ${RECORD:-4:12}`. Needs root, iproute2. Prints rank 0's output.
set -u
n=$1 rate=$2 script=$3 out=${4:-}; py=${PYTHON:-python3}; etloom=$(dirname "$py")/etloom; tag=nl$$; logs=$(mktemp -d)
cleanup() { for ((i = 0; i < n; i++)); do ip netns del $tag$i 2>/dev/null; done; ip link del br$tag 2>/dev/null; rm -rf "$logs"; }
trap cleanup EXIT
ip link add br$tag type bridge && ip link set br$tag up || exit 1
for ((i = 0; i < n; i++)); do
  ip netns add $tag$i; ip link add v$tag$i mtu ${MTU:-9000} type veth peer name e$i mtu ${MTU:-9000} netns $tag$i; ip link set v$tag$i master br$tag up
  tc qdisc add dev v$tag$i root tbf rate $rate burst 32kb latency 400ms
  ip netns exec $tag$i tc qdisc add dev e$i root tbf rate $rate burst 32kb latency 400ms
  ip -n $tag$i addr add 10.77.0.$((i + 1))/24 dev e$i; ip -n $tag$i link set e$i up; ip -n $tag$i link set lo up
done
for ((i = 0; i < n; i++)); do
  command=("$py" "$script"); [ -n "$out" ] && command=("$etloom" collect --out "$out" --steps "${RECORD:-4:12}" -- "${command[@]}")
  ip netns exec $tag$i env RANK=$i LOCAL_RANK=0 WORLD_SIZE=$n MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 GLOO_SOCKET_IFNAME=e$i OMP_NUM_THREADS=1 \
    "${command[@]}" >"$logs/$i" 2>&1 & pids[i]=$!
done
status=0; for ((i = 0; i < n; i++)); do wait "${pids[i]}" || { status=1; echo "rank $i failed:"; tail -5 "$logs/$i"; }; done
grep -h STEPS_MS "$logs/0"; exit $status
