#!/bin/sh
# Create or refresh the virtual environment that the Makefile works with.
#
# Picks $PYTHON, else the first Python of 3.11 or newer on PATH that really runs and has the venv
# module (a version manager's stub may be on PATH without the version behind it).
set -eu
venv=$1

suits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        if suits "$PYTHON"; then echo "$PYTHON"; return; fi
        echo "make: PYTHON=$PYTHON is not a Python 3.11 or newer with the venv module." >&2
        return 1
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if suits "$candidate"; then echo "$candidate"; return; fi
    done
    echo "make: no Python 3.11 or newer with the venv module found (tried python3.11, python3.12," >&2
    echo "      python3.13, python3, python). Install one, or say where: make PYTHON=/path/to/python3.11" >&2
    return 1
}

if ! suits "$venv/bin/python"; then
    python=$(find_python)
    echo "setting up $venv with $("$python" --version); this takes a few minutes once"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt -e '.[dev,torch,report]'
