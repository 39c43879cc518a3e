#!/bin/sh
# Says in one line why Corral cannot be installed here, before anything is downloaded or compiled.
# The Makefile runs it: sh cluster/preflight.sh PYTHON FOLDER [the folder with a wheel of llama.cpp]
python=$1 folder=$2 wheels=$3
stop() {
    echo "Corral cannot be installed: $1" >&2
    exit 1
}
another="Name another one: make serve PYTHON=python3.12"
debian="On Debian and Ubuntu: sudo apt-get install --yes"

[ "$(uname -s)" = Linux ] || stop "it needs Linux, and this is $(uname -s)."
case $(uname -m) in
    x86_64 | aarch64) ;;
    *) stop "Ray has no package for processors of the kind $(uname -m)." ;;
esac
if [ -e /etc/alpine-release ]; then
    stop "Ray has no package for Alpine Linux, whose C library is musl."
fi
command -v "$python" > /dev/null || stop "there is no $python. $another"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' ||
    stop "it needs Python 3.11 to 3.14, and $python is $("$python" --version 2>&1). $another"
"$python" -c 'import ensurepip, venv' 2> /dev/null ||
    stop "$python cannot make environments. $debian python3-venv"
if [ -z "$wheels" ]; then
    for program in "${CC:-cc}" "${CXX:-c++}" cmake; do
        command -v "${program%% *}" > /dev/null ||
            stop "llama.cpp is compiled here, and there is no ${program%% *}. $debian cmake g++"
    done
else
    ls "$wheels"/llama_cpp_python-*.whl > /dev/null 2>&1 ||
        stop "$wheels has no wheel of llama-cpp-python. \`make wheels\` makes one, in dist."
fi
needed=3
free=$(df -Pk "$folder" | awk 'NR == 2 {print int($4 / 1048576)}')
[ "$free" -ge "$needed" ] || stop "$needed GB of disk are needed in $folder, and $free GB are free."
