#!/usr/bin/env bash
# Three hosts on one machine, for tests: ws (the workstation) reaches train and eval, which do not reach each other.
#
#   three_hosts.sh up | down | exec HOST COMMAND... | pid HOST | container ID [PYTHON] | cut HOST | mend HOST
#
# Each has a root of its own (an overlay over this machine's), a disk of its own (a tmpfs of SIZE_<host>, so that it
# can be full), its own processes and its own sshd; a link of its own leads from ws to each (RATE slows it down).
# `container` starts an LXC container in train; with PYTHON that interpreter is seen in it. `cut` silences a link
# without telling either end, as a pulled cable does. Needs root, iproute2,
# nftables, openssh-server and, for containers, lxc.
# HOSTS_DIR, HOSTS_PREFIX and HOSTS_NET keep two sets apart.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
dir=${HOSTS_DIR:-} prefix=${HOSTS_PREFIX:-dg} net=${HOSTS_NET:-10.99}
hosts=(ws train eval)

netns() { echo "$prefix-$1"; }
address() { case $1 in train) echo "$net.1.2" ;; eval) echo "$net.2.2" ;; esac; }

# The first process of a host, its sshd, as this machine counts it.
pid_of() { local outer; outer=$(cat "$dir/$1.pid") && awk '{print $1}' "/proc/$outer/task/$outer/children"; }

# What runs inside a host before its sshd: the disk, the root over it, the files that make it a host of its own.
become_host() {
    local host=$1 size=$2 root=$dir/$1/root
    hostname "$host"
    mount -t tmpfs -o "size=$size,mode=755" "$host-disk" "$dir/$host"
    mkdir "$dir/$host/upper" "$dir/$host/scratch" "$root"
    mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/$host/upper,workdir=$dir/$host/scratch" "$root"
    mount -t proc proc "$root/proc"
    mount -t sysfs sysfs "$root/sys"
    mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o size=16m tmpfs "$root/run"
    mkdir -p "$root/run/sshd" "$root/root/.ssh" "$root/data"
    rm -rf "$root"/root/.ssh/*
    chmod 700 "$root/root/.ssh"
    cp "$dir/key.pub" "$root/root/.ssh/authorized_keys"
    printf '127.0.0.1 localhost %s\n%s train\n%s eval\n' "$host" "$(address train)" "$(address eval)" >"$root/etc/hosts"
    install -m 600 "$dir/hostkey_$host" "$root/etc/ssh/hosts_key"
    install -m 755 "$here/pct" "$root/usr/local/bin/pct"
    ln -sfn "$PYTHON" "$root/usr/local/bin/python3"
    printf '%s\n' 'HostKey /etc/ssh/hosts_key' 'PermitRootLogin prohibit-password' 'PasswordAuthentication no' \
        'UsePAM no' 'UseDNS no' 'MaxStartups 100' 'PidFile none' \
        'SetEnv PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' >"$root/etc/ssh/hosts_sshd"
    if [ "$host" = ws ]; then
        install -m 600 "$dir/key" "$root/root/.ssh/id_ed25519"
        for other in train eval; do
            echo "$other $(cut -d' ' -f1,2 "$dir/hostkey_$other.pub")"
        done >"$root/root/.ssh/known_hosts"
    fi
    cd "$root"
    mkdir -p mnt/old
    pivot_root . mnt/old # a root in earnest: entering a container's namespaces from here needs one
    umount -l /mnt/old
    exec /usr/sbin/sshd -D -e -f /etc/ssh/hosts_sshd
}

start_host() {
    local size="SIZE_$1"
    ip netns exec "$(netns "$1")" unshare --mount --pid --uts --fork --kill-child --propagation private \
        bash "$here/three_hosts.sh" become "$1" "${!size:-512m}" >"$dir/$1.log" 2>&1 </dev/null &
    echo $! >"$dir/$1.pid"
}

up() {
    mkdir -p "${hosts[@]/#/$dir/}"
    ssh-keygen -q -t ed25519 -N '' -C ws -f "$dir/key"
    local host other number=0
    for host in "${hosts[@]}"; do
        ssh-keygen -q -t ed25519 -N '' -C "$host" -f "$dir/hostkey_$host"
        ip netns add "$(netns "$host")"
        ip -n "$(netns "$host")" link set lo up
    done
    for other in train eval; do # no bridge in common, and ws forwards nothing
        number=$((number + 1))
        ip -n "$(netns ws)" link add "to-$other" type veth peer name eth0 netns "$(netns "$other")"
        ip -n "$(netns ws)" addr add "$net.$number.1/24" dev "to-$other"
        ip -n "$(netns "$other")" addr add "$net.$number.2/24" dev eth0
        ip -n "$(netns ws)" link set "to-$other" up
        ip -n "$(netns "$other")" link set eth0 up
        ip -n "$(netns "$other")" route add default via "$net.$number.1"
        if [ -n "${RATE:-}" ]; then
            ip netns exec "$(netns ws)" tc qdisc add dev "to-$other" root tbf rate "$RATE" burst 1mb latency 50ms
            ip netns exec "$(netns "$other")" tc qdisc add dev eth0 root tbf rate "$RATE" burst 1mb latency 50ms
        fi
    done
    ip netns exec "$(netns ws)" sysctl -qw net.ipv4.ip_forward=0
    for host in "${hosts[@]}"; do start_host "$host"; done
    for host in "${hosts[@]}"; do
        for _ in $(seq 250); do
            if ip netns exec "$(netns "$host")" ss -Hltn 'sport = :22' | grep -q .; then continue 2; fi
            sleep 0.02
        done
        echo "host $host did not start:" >&2
        cat "$dir/$host.log" >&2
        exit 1
    done
}

down() {
    local host
    for host in "${hosts[@]}"; do
        # The end of its first process is the end of every process and mount in it.
        if [ -f "$dir/$host.pid" ]; then kill -9 "$(cat "$dir/$host.pid")" 2>/dev/null || true; fi
        ip netns del "$(netns "$host")" 2>/dev/null || true
        rm -f "$dir/$host.pid"
    done
}

# Runs in train. The template's container has no network; /data is the folder of that name in train.
container() {
    local id=$1 python=${2:-} config=/var/lib/lxc/$1/config
    mkdir -p /var/lib/lxc
    lxc-create -n "$id" -t busybox >/dev/null
    sed -i 's/^lxc.net.*//; s/^lxc.apparmor.*//' "$config"
    echo 'lxc.net.0.type = empty' >>"$config"
    echo 'lxc.mount.entry = /data data none rw,bind,create=dir 0 0' >>"$config"
    if [ -n "$python" ]; then
        local base
        base=$("$python" -c 'import sys; print(sys.base_prefix)')
        echo "lxc.mount.entry = $base ${base#/} none ro,bind,create=dir 0 0" >>"$config"
        rm -f "/var/lib/lxc/$id/rootfs/bin/python3"
        printf '#!/bin/sh\nexec %s/bin/python3 "$@"\n' "$base" >"/var/lib/lxc/$id/rootfs/bin/python3"
        chmod 755 "/var/lib/lxc/$id/rootfs/bin/python3"
    fi
    lxc-start -n "$id"
}

enter() {
    local host=$1
    shift
    exec nsenter -t "$(pid_of "$host")" -m -u -n -p -r -w -- env -i HOME=/root USER=root LANG=C.UTF-8 \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

case ${1:-} in
up) up ;;
down) down ;;
become) become_host "$2" "$3" ;;
exec) enter "${@:2}" ;;
pid) pid_of "$2" ;;
container) enter train bash "$here/three_hosts.sh" in-train "${@:2}" ;;
in-train) container "${@:2}" ;;
cut)
    ip netns exec "$(netns "$2")" nft add table inet cut
    ip netns exec "$(netns "$2")" nft add chain inet cut input '{ type filter hook input priority 0; policy drop; }'
    ;;
mend) ip netns exec "$(netns "$2")" nft delete table inet cut ;;
*)
    sed -n '2,13p' "$0"
    exit 2
    ;;
esac
