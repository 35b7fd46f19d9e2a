# shellcheck shell=bash
# The virtual environment of this checkout: makes it on first use, renews it when what it was made from changes.
# Sourced by scripts/pase and scripts/test, never run. Sets ROOT and VENV; ensure_environment is what they call.
#
#   PASE_VENV     where the environment is (default: .venv in the root of the checkout)
#   PASE_PYTHON   the interpreter to make it with, a Python 3.11, 3.12 or 3.13 (default: the first that is found)

# The folder is taken from the path of this file, with links resolved, so that it does not matter where one calls from.
ROOT=$(CDPATH='' cd -P -- "${BASH_SOURCE[0]%/*}/.." && pwd)
VENV=${PASE_VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV
# The three installations, each with all of the one before it: what searches, explains and emits (seconds); what runs
# programs, installed when a command first needs it (TensorFlow: a minute); what lint, types, tests and the
# documentation's site need.
# shellcheck disable=SC2034
CORE_EXTRAS=
BASE_EXTRAS=mesh,data,serve
# shellcheck disable=SC2034
ALL_EXTRAS=$BASE_EXTRAS,onnx,torch,keras,jax,notebook,docs,dev
# The release of PyTorch to install; empty for the one that constraints.txt pins.
TORCH_RELEASE=
# Exists while an installation goes on, and after one that was killed.
UNFINISHED=$VENV/pase-install.unfinished

# use_fake_gpu_environment: from here on it is a second one, beside the first, with PyTorch's build for CUDA, which the
# package index has; it needs no GPU.
use_fake_gpu_environment() {
    VENV=$VENV-fake-gpu
    UNFINISHED=$VENV/pase-install.unfinished
    TORCH_RELEASE=2.14.1
}

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "pase: $*"
    exit 1
}

# fingerprint EXTRAS: puts into $fingerprint all that an installation depends on. It is the text itself, not a digest
# of it: bash reads and compares some kilobytes in less time than a program that computes a digest takes to start.
fingerprint() {
    local setup constraints
    # read reports the end of the file, which it always meets here, as a failure.
    IFS= read -r -d '' setup <"$ROOT/setup.py" || true
    IFS= read -r -d '' constraints <"$ROOT/constraints.txt" || true
    fingerprint="root $ROOT"$'\n'"extras $1${TORCH_RELEASE:+, torch $TORCH_RELEASE}"$'\n'"$setup$constraints"
}

# environment_is_ready EXTRAS: true if an installation with these extras was completed and nothing changed since.
environment_is_ready() {
    local fingerprint stamp=
    [[ -x $VENV/bin/python && -x $VENV/bin/pase && -r $VENV/pase-${1:-core}.stamp ]] || return 1
    IFS= read -r -d '' stamp <"$VENV/pase-${1:-core}.stamp" || true
    fingerprint "$1"
    [[ $stamp == "$fingerprint" ]]
}

# write_stamp EXTRAS: the last act of an installation. Renamed into place, so that it is there whole or not at all.
write_stamp() {
    local fingerprint
    fingerprint "$1"
    printf '%s' "$fingerprint" >"$VENV/pase-${1:-core}.stamp.new"
    mv -f -- "$VENV/pase-${1:-core}.stamp.new" "$VENV/pase-${1:-core}.stamp"
}

is_tried_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

# find_python: puts into $python an interpreter that can make the environment.
find_python() {
    local candidate
    python=
    if [[ -n ${PASE_PYTHON-} ]]; then
        is_tried_python "$PASE_PYTHON" ||
            fail "PASE_PYTHON is '$PASE_PYTHON', which is not a Python 3.11, 3.12 or 3.13 that runs. Set it to one, or unset it."
        python=$PASE_PYTHON
    else
        for candidate in python3.11 python3.12 python3.13 python3 python; do
            if is_tried_python "$candidate"; then
                python=$candidate
                break
            fi
        done
        [[ -n $python ]] || fail "found no Python 3.11, 3.12 or 3.13, one of which PaSE needs." \
            "Install it, or set PASE_PYTHON to the path of one."
    fi
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        fail "'$python' has no venv or ensurepip module. Install them (on Debian and Ubuntu: python3-venv)," \
            "or set PASE_PYTHON to another Python 3.11, 3.12 or 3.13."
}

# current_action LOG: puts into $action what pip's log says that it is doing.
current_action() {
    local line
    action=
    while IFS= read -r line; do
        case $line in
            'Collecting '*) line=${line#Collecting } action="fetching ${line%% *}" ;;
            'Installing collected packages'*) action='unpacking the packages' ;;
        esac
    done <"$1"
}

interrupted() {
    kill "$1" 2>/dev/null || true
    say
    say "pase: interrupted; the environment is incomplete, and the next call makes it anew."
    exit 130
}

# run_step WHAT COMMAND...: runs a command with progress on stderr. What the command prints is shown only if it fails;
# its status is returned.
run_step() {
    local what=$1 log=$VENV/pase-install.log started=$SECONDS said=0 elapsed status=0 action pid
    shift
    : >"$log"
    "$@" </dev/null >"$log" 2>&1 &
    pid=$!
    # A command in the background does not get the terminal's Ctrl-C.
    # shellcheck disable=SC2064
    trap "interrupted $pid" INT TERM HUP
    [[ -t 2 ]] || say "  $what ..."
    while kill -0 "$pid" 2>/dev/null; do
        elapsed=$((SECONDS - started))
        current_action "$log"
        if [[ -t 2 ]]; then
            printf '\r\033[K  %s ... %d s  %s' "$what" "$elapsed" "$action" >&2
        elif ((elapsed >= said + 15)); then
            said=$elapsed
            say "  $what ... $elapsed s  $action"
        fi
        sleep 0.2
    done
    wait "$pid" || status=$?
    trap - INT TERM HUP
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
    if ((status)); then
        say "  $what: failed. The end of its output (all of it is in $log):"
        tail -n 40 -- "$log" >&2
        return "$status"
    fi
    say "  $what: done in $((SECONDS - started)) s"
}

pip_install() {
    sed "${TORCH_RELEASE:+s/^torch==.*/torch==$TORCH_RELEASE/}" "$ROOT/constraints.txt" >"$VENV/pase-constraints.txt"
    # -I: neither PYTHONPATH nor the user's packages count as installed here. PIP_USER: a user's default cannot apply.
    PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -I -m pip install --no-input \
        --constraint "$VENV/pase-constraints.txt" "$@"
}

# make_venv: leaves in $VENV a virtual environment of a Python that was tried, whose making was never cut off half-way.
make_venv() {
    local python made_as=$VENV
    # The programs in an environment hold its path, so one that was moved is of no use.
    [[ ! -r $VENV/pase-location ]] || IFS= read -r made_as <"$VENV/pase-location"
    if [[ -e $UNFINISHED ]]; then
        say "  (an earlier set-up was cut off: starting afresh)"
    elif [[ $made_as != "$VENV" ]]; then
        say "  (it was moved from $made_as: starting afresh)"
    elif [[ -e $VENV && ! -e $VENV/pyvenv.cfg && -n $(ls -A -- "$VENV") ]]; then
        fail "$VENV exists and is not a virtual environment. Move it away, or set PASE_VENV to another path."
    elif "$VENV/bin/python" -I -m pip --version >/dev/null 2>&1; then
        is_tried_python "$VENV/bin/python" ||
            fail "$VENV is an environment of another Python than 3.11, 3.12 or 3.13. Delete it, or set PASE_VENV to another path."
        return
    fi
    find_python
    mkdir -p -- "$VENV"
    find "$VENV/" -mindepth 1 -delete
    : >"$UNFINISHED"
    run_step "making a virtual environment" "$python" -m venv "$VENV" || fail "$python could not make one in $VENV."
    printf '%s\n' "$VENV" >"$VENV/pase-location"
}

# install_step WHAT PIP-ARGUMENTS...: a failure that pip reports itself leaves an environment to go on from.
install_step() {
    local what=$1
    shift
    run_step "$what" pip_install "$@" || {
        rm -f -- "$UNFINISHED"
        fail "could not set up the environment. Once the cause is gone (no connection? no space?), call again."
    }
}

# install EXTRAS: brings the environment up to date, and only then marks it as such.
install() {
    local size="a few packages; seconds"
    [[ -z $1 ]] || size="2 GB, mostly TensorFlow, which programs run on; half a minute to five minutes"
    [[ -z $TORCH_RELEASE ]] || size="7 GB, mostly PyTorch $TORCH_RELEASE with CUDA's libraries; five minutes"
    say "Setting up PaSE's environment in $VENV"
    say "(on first use, and when setup.py or the pinned versions change; $size)"
    make_venv
    rm -f -- "$VENV"/pase-*.stamp
    : >"$UNFINISHED"
    # With setuptools in place pip needs no environment of its own to build in, so a renewal works without a network.
    install_step "installing setuptools" setuptools
    install_step "installing PaSE${1:+ with [$1]}" --no-build-isolation --editable "$ROOT${1:+[$1]}"
    # A folder that cannot be written to is no reason to fail: Python then compiles at each start.
    "$VENV/bin/python" -m compileall -q "$ROOT/pase" "$ROOT/models" >/dev/null 2>&1 || true
    write_stamp "$CORE_EXTRAS"
    [[ -z $1 ]] || write_stamp "$BASE_EXTRAS"
    write_stamp "$1"
    rm -f -- "$UNFINISHED"
}

# ensure_environment EXTRAS: one of the three lists of extras.
ensure_environment() {
    if environment_is_ready "$1"; then return; fi
    mkdir -p -- "${VENV%/*}"
    # One installation at a time. pip inherits the lock: should this shell be killed, it is held until pip has ended.
    if command -v flock >/dev/null; then
        exec 9>"$VENV.lock"
        if ! flock -n 9; then
            say "Waiting for another call that is setting up $VENV ..."
            flock 9
        fi
    fi
    environment_is_ready "$1" || install "$1"
    exec 9>&-
}
