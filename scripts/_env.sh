# Sourced by the other scripts: goes to the project root and puts an up-to-date virtual environment first on the PATH.
#
# The environment is .venv in the project root. A stamp in it names what it was built from (pyproject.toml, the
# interpreter, the place of the tree); while that still holds, nothing is run and the caller starts at once.
# PYTHON=/path/to/python chooses another interpreter, 3.11 or later.
#
# A caller that only runs what there is sets TOPICS_NEEDS=server before: what developers need is three times as much.

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

# Silent unless it fails. Another installation that is under way is waited for.
_apt_install() {
    [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null || return 1
    _say "installing $*"
    local said
    said="$({ _apt_get install -y "$@" || { _apt_get update && _apt_get install -y "$@"; }; } 2>&1)" ||
        { printf '%s\n' "$said" >&2; return 1; }
}

_apt_get() { DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" </dev/null; }

# The project with its extra $1 into the environment.
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

# What a finished environment made from interpreter $1 carries in its stamp.
_wanted_stamp() {
    local version
    version="$(_python_version "$1")" || return 1
    printf '%s\n%s\n%s\n' "$(sha256sum <pyproject.toml)" "$version" "$TOPICS_ROOT"
}

# Without PYTHON the environment's own interpreter answers for the version: a system upgrade that breaks it shows
# here, and no search is needed.
_venv_is_current() {
    local wanted
    [[ -x "$TOPICS_VENV/bin/python" ]] || return 1
    wanted="$(_wanted_stamp "${PYTHON:-$TOPICS_VENV/bin/python}")" || return 1
    _is_stamped .topics-stamp || { [[ "$TOPICS_NEEDS" == server ]] && _is_stamped .topics-server-stamp; }
}

_is_stamped() { [[ -f "$TOPICS_VENV/$1" && "$(<"$TOPICS_VENV/$1")" == "$wanted" ]]; }

# True when .venv works, was made here and by the interpreter that we would make it with, so that only packages differ.
# A copied or moved environment is not usable: its commands start the interpreter of the old place.
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
        _die "Python 3.11 or later is needed${PYTHON:+, and $PYTHON is not one}; PYTHON=/path chooses it"

    # A link would make this environment somebody else's, and break theirs.
    [[ -L "$TOPICS_VENV" ]] && _die ".venv is a link to another place; remove it, and it is made here"

    _say "setting up .venv with $(_python_version "$python"), a matter of minutes; later runs skip this"
    rm -f "$TOPICS_VENV/.topics-stamp" "$TOPICS_VENV/.topics-server-stamp"
    if command -v uv >/dev/null; then
        _venv_is_usable "$python" || { rm -rf "$TOPICS_VENV" && uv venv -q --python "$python" "$TOPICS_VENV" >&2; } ||
            _die "could not make .venv"
        printf '%s' "$TOPICS_ROOT" >"$TOPICS_VENV/.topics-root"
    else
        if ! { _venv_is_usable "$python" && "$TOPICS_VENV/bin/python" -c 'import pip' 2>/dev/null; }; then
            # Debian ships venv without ensurepip, which then fails half-way.
            "$python" -c 'import ensurepip, venv' 2>/dev/null ||
                _apt_install python3-venv ||
                _die "this Python cannot make virtual environments; install python3-venv"
            "$python" -m venv --clear "$TOPICS_VENV" >&2 || _die "could not make .venv"
            printf '%s' "$TOPICS_ROOT" >"$TOPICS_VENV/.topics-root"
        fi
    fi
    _install_packages "$packages" || _die "could not install the packages; what pip says is above"

    # Only now: an install that was interrupted leaves no stamp and is repeated.
    _wanted_stamp "$TOPICS_VENV/bin/python" >"$TOPICS_VENV/$stamp.new"
    mv "$TOPICS_VENV/$stamp.new" "$TOPICS_VENV/$stamp"
}

# Spark and a Java for it, half a gigabyte: only for those who ask. A stamp of its own names what they were installed from.
_need_spark() {
    local stamp="$TOPICS_VENV/.topics-spark-stamp"
    (
        if command -v flock >/dev/null; then flock 9; fi
        [[ -f "$stamp" && "$(<"$stamp")" == "$(_wanted_stamp "$TOPICS_VENV/bin/python")" ]] && exit 0
        _say "installing Spark into .venv, half a gigabyte; later runs skip this"
        # delta-rs is wanted by one form of the export alone, and tests of it tell when it is missing.
        _install_packages spark,java,delta || _install_packages spark,java || exit 1
        _wanted_stamp "$TOPICS_VENV/bin/python" >"$stamp.new" && mv "$stamp.new" "$stamp"
    ) 9>"$TOPICS_ROOT/.venv.lock"
}

if ! _venv_is_current; then
    # One builder at a time; whoever waited finds the work done.
    (
        if command -v flock >/dev/null; then flock 9; fi
        _venv_is_current || _build_venv
    ) 9>"$TOPICS_ROOT/.venv.lock"
fi

export VIRTUAL_ENV="$TOPICS_VENV"
export PATH="$TOPICS_VENV/bin:$PATH"
unset PYTHONHOME
