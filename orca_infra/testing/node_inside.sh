#!/bin/sh
# PID 1 of a real node's own mount, PID and network namespaces (node.py): `node_inside.sh FOLDER`. It prepares what the
# node's programs see of the machine, says in FOLDER/inside that it is ready or what failed, and stays. When it ends, the
# kernel ends everything in its namespaces and removes their mounts and links; nothing of them was ever the machine's.
folder=$1
read -r pid rest </proc/self/stat # our number outside: /proc is still the machine's

say() {
    echo "$1" >"$folder/inside.new"
    mv "$folder/inside.new" "$folder/inside"
}
try() {
    what=$1
    shift
    if ! words=$("$@" 2>&1); then
        say "failed $what: $words"
        exit 1
    fi
}

try "to mount /proc" mount -t proc proc /proc
mkdir -p "$folder/run/lock" "$folder/log" "$folder/lib" "$folder/work" "$folder/sysctl"
# What the programs would write to the machine's folders goes to ours.
try "to mount an overlay in $folder" mount -t overlay overlay \
    -o "lowerdir=/var/lib,upperdir=$folder/lib,workdir=$folder/work" /var/lib
try "to mount over /var/log" mount --bind "$folder/log" /var/log
try "to mount over /run" mount --bind "$folder/run" /run
# The kubelet sets these for the whole kernel where it finds other values: it is shown the values that it wants.
for wanted in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    shown="$folder/sysctl/$(echo "${wanted%=*}" | tr / .)"
    echo "${wanted#*=}" >"$shown"
    try "to mount over /proc/sys/${wanted%=*}" mount --bind "$shown" "/proc/sys/${wanted%=*}"
done
try "to raise lo" ip link set lo up
say "ready $pid"
# CHLD ignored, the kernel takes away what dies here (containers' shims), and no zombie stays.
exec env --ignore-signal=CHLD sleep infinity
