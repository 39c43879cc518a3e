#!/usr/bin/env bash
# Prometheus' increase() of a counter is zero for its first value: an alert on a process's first fault cannot fire.
#
# Version: Prometheus 2.42.0+ds-5+deb12u1 (Debian 12; unpacked, not installed)
# Behaviour: A counter with labels appears with the first count, as client libraries export it. increase() compares samples of
# the same series, and nothing was there before. Each process that comes new is a new series, so the alert misses the
# fault of each. A counter that was exported as 0 before is counted.
# Seen:
#   born with its first fault: increase 0, alert silent
#   exported as 0 before: increase 1, alert fires
set -euo pipefail
packages="prometheus=2.42.0+ds-5+deb12u1"
[ -z "${NEWEST-}" ] || packages=$(sed 's/=[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
{ apt-get download -qq $packages && dpkg --fsys-tarfile ./*.deb | tar x ./usr/bin/promtool; } 2> log || { cat log; exit 2; }

cat > rules.yml <<'YAML'
groups:
  - name: faults
    rules:
      - alert: ProcessFailed
        expr: increase(faults_total[5m]) > 0
YAML

# Each case: name, samples every 15 seconds (the fault is the fifth one), the increase and the alerts that are expected.
while IFS='|' read -r name samples increase alerts says; do
	cat > test.yml <<-YAML
		rule_files: [rules.yml]
		evaluation_interval: 15s
		tests:
		  - interval: 15s
		    input_series: [{series: 'faults_total{process="7"}', values: '$samples'}]
		    promql_expr_test:
		      - expr: increase(faults_total[5m])
		        eval_time: 3m
		        exp_samples: [{labels: '{process="7"}', value: $increase}]
		    alert_rule_test:
		      - {eval_time: 3m, alertname: ProcessFailed, exp_alerts: [$alerts]}
	YAML
	if timeout 30 usr/bin/promtool test rules test.yml > log 2>&1; then
		echo "$name: increase $increase, alert $says"
	else
		cat log
	fi
done > seen <<'CASES'
born with its first fault|_x4 1x20|0||silent
exported as 0 before|0x3 1x20|1|{exp_labels: {process: "7"}}|fires
CASES
cat seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen
