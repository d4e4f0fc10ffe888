# Sourced by the other scripts: changes to the project root and puts an up-to-date virtual environment first on the PATH.
#
# The environment is .venv in the project root. A stamp in it records what it was built from (pyproject.toml, the
# interpreter, the path of the checkout); if that is unchanged, the caller starts at once.
# PYTHON=/path/to/python selects another interpreter, 3.11 or later.
#
# Callers that only run the server set TOPICS_NEEDS=server first: the developer packages are three times as large.

TOPICS_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
TOPICS_VENV="$TOPICS_ROOT/.venv"
TOPICS_NEEDS="${TOPICS_NEEDS:-dev}"
cd "$TOPICS_ROOT"

_say() { printf 'topics: %s\n' "$*" >&2; }
_die() { _say "$@"; exit 1; }

_python_version() {
    "$1" -c 'import sys; print(sys.implementation.name, *sys.version_info[:3], sep="-")' 2>/dev/null
}

_is_recent_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Silent unless it fails. Waits for another running installation.
_apt_install() {
    [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null || return 1
    _say "installing $*"
    local output
    output="$({ _apt_get install -y "$@" || { _apt_get update && _apt_get install -y "$@"; }; } 2>&1)" ||
        { printf '%s\n' "$output" >&2; return 1; }
}

_apt_get() { DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" </dev/null; }

# Install the project with its extra $1 into the environment.
_install_packages() {
    if command -v uv >/dev/null; then
        uv pip install -q --python "$TOPICS_VENV/bin/python" -e ".[$1]" >&2
    else
        "$TOPICS_VENV/bin/python" -m pip install -q --disable-pip-version-check -e ".[$1]" >&2
    fi
}

_find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        _is_recent_python "$PYTHON" || return 1
        command -v "$PYTHON"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if _is_recent_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# The stamp of a complete environment built with interpreter $1.
_wanted_stamp() {
    local version
    version="$(_python_version "$1")" || return 1
    printf '%s\n%s\n%s\n' "$(sha256sum <pyproject.toml)" "$version" "$TOPICS_ROOT"
}

# Without PYTHON, the environment's own interpreter is checked. That detects a system upgrade that broke it, without a search.
_venv_is_current() {
    local wanted
    [[ -x "$TOPICS_VENV/bin/python" ]] || return 1
    wanted="$(_wanted_stamp "${PYTHON:-$TOPICS_VENV/bin/python}")" || return 1
    _is_stamped .topics-stamp || { [[ "$TOPICS_NEEDS" == server ]] && _is_stamped .topics-server-stamp; }
}

_is_stamped() { [[ -f "$TOPICS_VENV/$1" && "$(<"$TOPICS_VENV/$1")" == "$wanted" ]]; }

# Whether .venv works and was created here with the same interpreter, so that only packages may differ.
# A copied or moved environment is not usable: its commands start the interpreter at the old path.
_venv_is_usable() {
    local have want
    [[ -f "$TOPICS_VENV/.topics-root" && "$(<"$TOPICS_VENV/.topics-root")" == "$TOPICS_ROOT" ]] || return 1
    have="$(_python_version "$TOPICS_VENV/bin/python")" && want="$(_python_version "$1")" && [[ "$have" == "$want" ]]
}

_build_venv() {
    local python stamp=.topics-stamp packages="$TOPICS_NEEDS"
    [[ "$TOPICS_NEEDS" != server ]] || stamp=.topics-server-stamp packages=otel
    python="$(_find_python)" ||
        { [[ -z "${PYTHON:-}" ]] && _apt_install python3 python3-venv && python="$(_find_python)"; } ||
        _die "Python 3.11 or later is required${PYTHON:+, and $PYTHON is not}; set PYTHON=/path to select it"

    # Installing through a link would break the environment of another checkout.
    [[ -L "$TOPICS_VENV" ]] && _die ".venv is a symbolic link; delete it, and a new environment is created here"

    _say "setting up .venv with $(_python_version "$python"); this takes minutes, later runs skip it"
    rm -f "$TOPICS_VENV/.topics-stamp" "$TOPICS_VENV/.topics-server-stamp"
    if command -v uv >/dev/null; then
        _venv_is_usable "$python" || { rm -rf "$TOPICS_VENV" && uv venv -q --python "$python" "$TOPICS_VENV" >&2; } ||
            _die "could not create .venv"
        printf '%s' "$TOPICS_ROOT" >"$TOPICS_VENV/.topics-root"
    else
        if ! { _venv_is_usable "$python" && "$TOPICS_VENV/bin/python" -c 'import pip' 2>/dev/null; }; then
            # Debian ships venv without ensurepip, so that it fails halfway.
            "$python" -c 'import ensurepip, venv' 2>/dev/null ||
                _apt_install python3-venv ||
                _die "this Python cannot create virtual environments; install python3-venv"
            "$python" -m venv --clear "$TOPICS_VENV" >&2 || _die "could not create .venv"
            printf '%s' "$TOPICS_ROOT" >"$TOPICS_VENV/.topics-root"
        fi
    fi
    _install_packages "$packages" || _die "could not install the packages; see pip's output above"

    # Written last: an interrupted installation leaves no stamp and is repeated.
    _wanted_stamp "$TOPICS_VENV/bin/python" >"$TOPICS_VENV/$stamp.new"
    mv "$TOPICS_VENV/$stamp.new" "$TOPICS_VENV/$stamp"
}

# Installs Spark and Java, half a gigabyte, with a separate stamp. Only called by scripts that need them.
_need_spark() {
    local stamp="$TOPICS_VENV/.topics-spark-stamp"
    (
        if command -v flock >/dev/null; then flock 9; fi
        [[ -f "$stamp" && "$(<"$stamp")" == "$(_wanted_stamp "$TOPICS_VENV/bin/python")" ]] && exit 0
        _say "installing Spark into .venv, half a gigabyte; later runs skip this"
        # delta-rs is optional: only the Delta export needs it, and its tests are skipped without it.
        _install_packages spark,java,delta || _install_packages spark,java || exit 1
        _wanted_stamp "$TOPICS_VENV/bin/python" >"$stamp.new" && mv "$stamp.new" "$stamp"
    ) 9>"$TOPICS_ROOT/.venv.lock"
}

if ! _venv_is_current; then
    # One builder at a time; the check is repeated with the lock held.
    (
        if command -v flock >/dev/null; then flock 9; fi
        _venv_is_current || _build_venv
    ) 9>"$TOPICS_ROOT/.venv.lock"
fi

export VIRTUAL_ENV="$TOPICS_VENV"
export PATH="$TOPICS_VENV/bin:$PATH"
unset PYTHONHOME
