# Sourced by the other commands here: finds, or makes, the Python environment that they run in.
#
#   find_python      sets $python: $ZEROENGINE_PYTHON, else the checkout's .venv, else python3
#   run_python "MODULES" ARGUMENTS
#                    runs that Python with the arguments, if it has the modules
#   help_or_version "$@"
#                    prints the help or the version and exits, if the first argument asks for it
#   prepare [test]   makes .venv where there is none, installs this checkout in it, then as above;
#                    with $ZEROENGINE_PYTHON set it installs nothing, and it changes no other checkout's environment

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
torch_version=2.13.0  # what is tested; installed where no usable torch is there

say() { echo "${0##*/}: $*" >&2; }
die() { say "$*"; exit 1; }

# With -h or --help: the text at the head of the command, and exit code 0. With --version: that of this checkout.
help_or_version() {
    case "${1:-}" in
        -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[1]}"; exit ;;
        --version) sed -n 's/^__version__ = "\(.*\)"/zeroengine \1/p' "$root/zeroengine/__init__.py"; exit ;;
    esac
}

find_python() {
    if [[ -n "${ZEROENGINE_PYTHON:-}" ]]; then
        python="$(command -v "$ZEROENGINE_PYTHON")" || die "ZEROENGINE_PYTHON is $ZEROENGINE_PYTHON, which cannot be run"
    elif [[ -x "$venv/bin/python" ]]; then
        python="$venv/bin/python"
    else
        python="$(command -v python3)" || die "there is no python3: install Python 3.10 or newer"
    fi
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
}

prepare() {
    if [[ -z "${ZEROENGINE_PYTHON:-}" ]]; then
        local wanted="base"
        [[ "${1:-}" != test ]] || wanted="base test"
        local sources; sources="$(fingerprint)"
        local found; found="$(cat "$venv/zeroengine-stamp" 2>/dev/null || true)"
        if ! "$venv/bin/python" -c "" 2>/dev/null || [[ "$found" != "$sources $wanted"* ]]; then
            check_own_environment
            install_checkout "${1:-}"
            echo "$sources $wanted" >"$venv/zeroengine-stamp"
        fi
    fi
    find_python
}

# Of all that an installation depends on: sources, whether there are compilers and a GPU, and what is asked of nvcc.
fingerprint() {
    (
        cd "$root"
        {
            find pyproject.toml setup.py csrc -type f -exec cksum {} + | sort
            command -v c++ g++ clang++ nvcc || true
            ls /proc/driver/nvidia/version 2>/dev/null || true
            echo "${CUDACXX:-} ${CUDA_HOME:-} ${ZEROENGINE_CUDA:-} ${ZEROENGINE_CUDA_ARCHITECTURES:-}"
        } | cksum | tr -d ' '
    )
}

# An environment that .venv is a link to may be that of another checkout, whose commands would then run this one.
check_own_environment() {
    [[ -L "$venv" ]] || return 0
    local other
    other="$("$venv/bin/python" -I - 2>/dev/null <<'PYTHON'
import importlib.metadata, json
print(json.loads(importlib.metadata.distribution("zeroengine").read_text("direct_url.json"))["url"].removeprefix("file://"))
PYTHON
)" || return 0
    [[ -d "$other" && "$(realpath "$other")" != "$(realpath "$root")" ]] || return 0
    die ".venv is a link to $(realpath "$venv"), where the checkout $other is installed, and installing this one would" \
        "replace it there. Remove the link, or set ZEROENGINE_PYTHON=$venv/bin/python, which installs nothing."
}

install_checkout() {
    if ! "$venv/bin/python" -c "" 2>/dev/null; then
        local base; base="$(base_python)" || die "Python 3.10 or newer is needed, and none is on the PATH"
        local packages=""
        ! has_torch "$base" || packages=--system-site-packages
        say "making a virtual environment in .venv"
        rm -rf "$venv"
        local output
        output="$("$base" -m venv $packages "$venv" 2>&1)" || {
            rm -rf "$venv"
            echo "$output" >&2
            die "$base cannot make a virtual environment: install its venv module (Debian: apt install python3-venv)"
        }
        [[ -z "$packages" ]] || has_torch "$venv/bin/python" || borrow_packages "$base"
    fi
    if ! has_torch "$venv/bin/python"; then
        say "installing torch $torch_version in .venv (minutes; once)"
        local index=https://download.pytorch.org/whl/cpu
        if [[ -e /proc/driver/nvidia/version || "$(uname)" != Linux ]] || ! answers "$index/torch/"; then
            index=""
        fi
        pip_install "torch==$torch_version" ${index:+--extra-index-url "$index"}
    fi
    # The tests check the CUDA kernels without a GPU, too. A run on this machine has no use for them.
    [[ -n "${1:-}" || -e /proc/driver/nvidia/version ]] || export ZEROENGINE_CUDA="${ZEROENGINE_CUDA:-0}"
    say "installing zeroengine in .venv"
    pip_install --verbose --editable "$root${1:+[$1]}"
}

base_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if command -v "$name" >/dev/null && "$name" -c "import sys; sys.exit(sys.version_info < (3, 10))"; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# Whether the address can be reached from here.
answers() {
    "$venv/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)' "$1" 2>/dev/null
}

# A torch that is recent enough; its version is read without importing it.
has_torch() {
    "$1" - 2>/dev/null <<'PYTHON'
import importlib.metadata, re, sys
major, minor = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch")).groups()
sys.exit((int(major), int(minor)) < (2, 11))
PYTHON
}

# --system-site-packages means those of the interpreter; where that one is itself in a virtual environment with
# torch, this adds that environment's packages.
borrow_packages() {
    local folder; folder="$("$1" -c 'import importlib.metadata as m; print(m.distribution("torch").locate_file(""))')"
    echo "$folder" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
}

# Quiet unless it fails.
pip_install() {
    local log="$venv/pip.log"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >"$log" 2>&1 </dev/null || {
        cat "$log" >&2
        die "pip install $* failed, see above"
    }
    sed -n '/^ *NOTICE/,/^ *$/p' "$log" >&2
}

# Runs the interpreter, if it has the modules in the first argument, with the other arguments.
run_python() {
    local modules="$1"; shift
    find_python
    "$python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' $modules ||
        die "$python lacks one of: $modules. Run bin/quickstart, which makes an environment, or set ZEROENGINE_PYTHON to a python that has them"
    exec "$python" "$@"
}
