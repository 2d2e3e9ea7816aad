#!/usr/bin/env bash
# Makes .venv as requirements.lock says, sees to a Java that Spark supports, and makes the archive of Spark's
# classes with which it starts faster.
#
#   tools/setup.sh [--dry-run]
#
# PYTHON picks the interpreter (python3 unless told). --dry-run says what would be installed and changes
# nothing. A second run finds its stamp in .venv and the archive, checks Java and is done. What can't be mended here ends
# with one sentence that says what to do, and exit code 1.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VENV=.venv
STAMP="$VENV/.holdfast-setup"
SUPPORTED_JAVA="17 21"
DRY_RUN=no

say() { printf 'setup: %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

run() {
    if [ "$DRY_RUN" = yes ]; then say "would run: $*"; else "$@" >/dev/null; fi
}

can_apt() { [ "$(id -u)" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get >/dev/null; }

apt_install() { run env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1"; }

# Java ------------------------------------------------------------------------------------------------

# Spark's own rule: JAVA_HOME if it is set, whatever it holds, else the java on PATH.
java_command() {
    if [ -n "${JAVA_HOME:-}" ]; then printf '%s' "$JAVA_HOME/bin/java"; else command -v java || true; fi
}

# Prints the major version ("1.8.0_402" is 8), or nothing where there is no Java that runs.
java_major() {
    local java
    java="$(java_command)"
    [ -n "$java" ] && [ -x "$java" ] || return 0
    { "$java" -version 2>&1 || true; } | sed -n -E 's/^.* version "(1\.)?([0-9]+).*$/\2/p' | head -n 1
}

java_is_supported() {
    local version
    for version in $SUPPORTED_JAVA; do [ "$1" = "$version" ] && return 0; done
    return 1
}

how_to_get_java() {
    if [ "$(uname -s)" = Darwin ]; then
        # shellcheck disable=SC2016  # for the reader's shell to expand
        printf '%s' 'run `brew install openjdk@17` and `export JAVA_HOME="$(brew --prefix openjdk@17)"`'
    elif [ -e /etc/debian_version ]; then
        # shellcheck disable=SC2016
        printf '%s' 'run `apt-get install openjdk-17-jre-headless` as root, or set JAVA_HOME to a Java 17 or 21 you have'
    else
        printf '%s' 'install a Java 17 or 21 runtime, or set JAVA_HOME to one you have'
    fi
}

# Debian 12 has 17; later ones have only 21.
jre_package() {
    local version
    for version in $SUPPORTED_JAVA; do
        if apt-cache show "openjdk-$version-jre-headless" >/dev/null 2>&1; then
            printf 'openjdk-%s-jre-headless' "$version"
            return
        fi
    done
    printf 'openjdk-17-jre-headless'
}

see_to_java() {
    local major found package
    major="$(java_major)"
    if java_is_supported "$major"; then return; fi
    if [ -n "${JAVA_HOME:-}" ]; then
        found="a folder without a working bin/java"
        if [ -n "$major" ]; then found="Java $major"; fi
        stop "Spark needs Java 17 or 21, and JAVA_HOME names $found: set it to a Java 17 or 21, or unset it, then run make again."
    fi
    found="there is none here"
    if [ -n "$major" ]; then found="the java on PATH is version $major"; fi
    if ! can_apt; then
        stop "Spark needs Java 17 or 21, and $found: $(how_to_get_java), then run make again."
    fi

    say "Spark needs Java 17 or 21, and $found: installing one with apt-get (a minute or two)"
    run apt-get update -qq || stop "apt-get update failed, so Java can't be installed: mend apt's sources, or $(how_to_get_java), then run make again."
    package="$(jre_package)"
    say "installing $package"
    apt_install "$package" || stop "apt-get could not install $package: $(how_to_get_java), then run make again."
    if [ "$DRY_RUN" = yes ]; then return; fi

    hash -r
    major="$(java_major)"
    java_is_supported "$major" ||
        stop "$package is installed, but another java comes before it on PATH: set JAVA_HOME to the new one (a folder in /usr/lib/jvm), then run make again."
    say "Java $major is ready"
}

# Python ----------------------------------------------------------------------------------------------

see_to_python() {
    local version
    command -v "$PYTHON" >/dev/null ||
        stop "there is no $PYTHON here: install Python 3.10 or newer, or name one with make setup PYTHON=/path/to/python3."
    version="$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ||
        stop "$PYTHON does not start: name another with make setup PYTHON=/path/to/python3."
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        stop "holdfast needs Python 3.10 or newer, and $PYTHON is $version: name a newer one with make setup PYTHON=/path/to/python3."
    if "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then return; fi

    # Debian keeps these two modules in a package of their own, one for each Python it has.
    if ! can_apt; then
        stop "$PYTHON can't make virtual environments (no ensurepip): install its venv package (on Debian, apt-get install python3-venv as root), then run make again."
    fi
    say "$PYTHON can't make virtual environments: installing python$version-venv with apt-get"
    run apt-get update -qq || stop "apt-get update failed, so python$version-venv can't be installed: mend apt's sources, then run make again."
    apt_install "python$version-venv" ||
        stop "apt-get could not install python$version-venv: install a Python that has venv, then run make setup PYTHON=/path/to/python3."
    if [ "$DRY_RUN" = yes ]; then return; fi
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "python$version-venv is installed, but $PYTHON still has no ensurepip: name another with make setup PYTHON=/path/to/python3."
}

# A virtual environment knows where it stands, so a moved one must be made again.
fingerprint() {
    pwd -P
    cksum pyproject.toml requirements.lock tools/setup.sh
}

venv_is_usable() {
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c 'import pip' 2>/dev/null &&
        { [ ! -e "$STAMP" ] || [ "$(head -n 1 "$STAMP")" = "$(pwd -P)" ]; }
}

see_to_venv() {
    if [ -e "$STAMP" ] && [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; then return; fi
    if ! venv_is_usable; then
        see_to_python
        say "making $VENV with $("$PYTHON" --version 2>&1)"
        run "$PYTHON" -m venv --clear "$VENV"
    fi
    say "installing $(grep -c '==' requirements.lock) locked packages into $VENV (a minute or two the first time)"
    run rm -f "$STAMP"
    run "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
    run "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
    if [ "$DRY_RUN" = yes ]; then return; fi
    fingerprint > "$STAMP"
    say "done: $VENV is ready"
}

# It only saves time, so set-up is well without it. It stays silent about one that is there or not wanted.
see_to_archive() {
    local told
    if [ "$DRY_RUN" = yes ]; then run "$VENV/bin/python" -m holdfast.engine.archive; return; fi
    told="$("$VENV/bin/python" -m holdfast.engine.archive 2>/dev/null | tail -n 1)" || true
    case "$told" in
        'Made '* | 'There is no '*) say "$told" ;;
    esac
}

case "${1:-}" in
    '') ;;
    --dry-run) DRY_RUN=yes ;;
    *) stop "usage: tools/setup.sh [--dry-run]" ;;
esac

see_to_java
see_to_venv
see_to_archive
