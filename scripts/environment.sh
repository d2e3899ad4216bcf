# Sourced by the scripts beside it: makes .venv in the checkout and installs what constraints.txt says, unless that is done already.

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
python="$root/.venv/bin/python"

find_python() {
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "penstock needs Python 3.11, 3.12 or 3.13; none was found. Set PYTHON to one." >&2
    return 1
}

make_venv() {
    found=$(find_python) || exit 1
    echo "Making .venv with $("$found" --version)" >&2
    if ! "$found" -m venv "$root/.venv"; then
        echo "$found cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
        rm -rf "$root/.venv"
        exit 1
    fi
}

pip_install() {
    "$python" -m pip install --quiet --disable-pip-version-check --no-input "$@"
}

# PyPI's torch for Linux brings gigabytes of CUDA. Where there is no driver, the CPU build does: from wherever pip is set up to look,
# or from PyTorch's own index. Where neither has it, PyPI's works too.
install_cpu_torch() {
    [ "$(uname -s)" = Linux ] || return 0
    [ ! -e /proc/driver/nvidia/version ] && ! command -v nvidia-smi >/dev/null 2>&1 || return 0
    "$python" -c 'import torch' 2>/dev/null && return 0
    version=$(sed -n 's/^torch==//p' "$root/constraints.txt")
    pip_install -c "$root/constraints.txt" "torch==$version+cpu" 2>/dev/null && return 0
    pip_install --no-deps --retries 1 --timeout 10 --index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" 2>/dev/null && return 0
    echo "No CPU build of torch $version was found; taking the default one, which is larger" >&2
}

# install EXTRAS: an empty string, or such as "[dev]". Quick where neither pyproject.toml nor constraints.txt has changed since; an
# environment with extras serves as one without.
install() {
    [ -x "$python" ] || make_venv
    wanted=$(cat "$root/constraints.txt" "$root/pyproject.toml" | cksum)
    for stamp in "$root/.venv/installed$1"*; do
        [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    done
    echo "Installing into .venv; the first time takes some minutes" >&2
    install_cpu_torch
    pip_install -c "$root/constraints.txt" -e "$root$1" || exit 1
    echo "$wanted" >"$root/.venv/installed$1"
}
