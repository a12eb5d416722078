#!/usr/bin/env bash
# Brings what Debian has to provide, and says what is missing where it may not.
#
#   deploy/debian.sh python INTERPRETER   an interpreter of a supported version that can make virtual environments
#   deploy/debian.sh tools FOLDER         what tests need: Java and Maven (Apache Kafka), Prometheus unpacked below
#                                         FOLDER, and for the testbed bcc, compilers and network tools
#
# Prometheus is unpacked and not installed, because installing it starts a service on a fixed port.
set -euo pipefail

fail() {
    echo "failslow: $1" >&2
    exit 1
}

refresh() {
    [ "$(id -u)" -eq 0 ] && apt-get update -qq
}

install() {
    command -v apt-get >/dev/null || fail "$* missing: install with your system's package manager, then run make again"
    [ "$(id -u)" -eq 0 ] || fail "$* missing: run 'sudo apt-get install $*', then make again"
    echo "failslow: installing $*"
    refresh
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

python() {
    command -v "$1" >/dev/null || [ "$1" != /usr/bin/python3 ] || install python3 python3-venv
    command -v "$1" >/dev/null || fail "no $1: name another interpreter with 'make PYTHON=...'"
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
        fail "$1 is $("$1" --version): 3.11, 3.12 or 3.13 is needed; name one with 'make PYTHON=...'"
    "$1" -c 'import ensurepip' 2>/dev/null || install python3-venv
}

tools() {
    command -v java >/dev/null || install default-jre-headless
    command -v mvn >/dev/null || install maven
    testbed
    if ! command -v prometheus >/dev/null; then
        mkdir -p "$1"
        cd "$1"
        apt-get download -qq prometheus 2>/dev/null || { refresh && apt-get download -qq prometheus; } ||
            fail "Prometheus missing: run 'sudo apt-get update' or install it, then make again"
        dpkg-deb --extract prometheus_*.deb .
        rm prometheus_*.deb
    fi
}

# The kernel's programs, stub libraries of NCCL, CUDA and NVML, and networks to run them in.
testbed() {
    local missing=()
    [ -e /usr/lib/python3/dist-packages/bcc ] || missing+=(python3-bpfcc)
    command -v cc >/dev/null || missing+=(gcc libc6-dev)
    command -v readelf >/dev/null || missing+=(binutils)
    ldconfig -p | grep -q "libbpf.so.1" || missing+=(libbpf1)
    command -v clang >/dev/null || missing+=(clang)
    command -v systemd-analyze >/dev/null || missing+=(systemd)
    { command -v ip && command -v tc; } >/dev/null || missing+=(iproute2)
    [ "${#missing[@]}" -eq 0 ] || install "${missing[@]}"
}

"$@"
