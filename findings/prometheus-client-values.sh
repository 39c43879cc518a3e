#!/usr/bin/env bash
# prometheus_client keeps every counter that was ever made, although nothing refers to it, in its multi-process mode.
#
# Version: prometheus-client 0.26.0 (PyPI)
# Behaviour: With PROMETHEUS_MULTIPROC_DIR, each value is put into a list that lives as long as the process, also without a
# registry. A program that makes the same counter again for each task grows with each. Without that mode, nothing stays.
# Seen:
#   values of 100 counters that were dropped, one process: 0
#   values of 100 counters that were dropped, multi-process: 100
set -euo pipefail
packages="prometheus-client==0.26.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2
mkdir values
cat > count.py <<'PYTHON'
import gc
import sys

import prometheus_client

for _ in range(100):
    prometheus_client.Counter("example", "An example.", registry=None).inc()
gc.collect()
n = sum(type(one).__name__ in ("MmapedValue", "MutexValue") for one in gc.get_objects())
print(f"values of 100 counters that were dropped, {sys.argv[1]}: {n}")
PYTHON
(
	timeout 50 env/bin/python count.py "one process"
	PROMETHEUS_MULTIPROC_DIR=values timeout 50 env/bin/python count.py multi-process
) | tee seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen
