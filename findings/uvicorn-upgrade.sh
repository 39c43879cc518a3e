#!/usr/bin/env bash
# uvicorn on httptools loses the body of a request that also offers to upgrade the connection.
#
# Version: uvicorn 0.54.0, httptools 0.9.0, h11 0.16.0 (PyPI), curl 7.88.1
# Behaviour: `curl --http2` offers HTTP/2 with each request to an http:// address, and so does Java 17's HttpClient by default.
# A server may ignore the offer (RFC 9110, section 7.8), and then answers the request as it is. On h11 uvicorn does so. On
# httptools, which it takes where that is installed, the application gets an empty body.
# Seen:
#   h11, plain request: 9 of 9 bytes
#   h11, request that offers an upgrade: 9 of 9 bytes
#   httptools, plain request: 9 of 9 bytes
#   httptools, request that offers an upgrade: 0 of 9 bytes
set -euo pipefail
packages="uvicorn==0.54.0 httptools==0.9.0 h11==0.16.0"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

cat > server.py <<'PYTHON'
import socket
import sys

import uvicorn


async def count(scope, receive, send):
    """Answers with the number of bytes in the body."""
    n_bytes, more = 0, True
    while more:
        event = await receive()
        n_bytes += len(event["body"])
        more = event["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"%d of 9 bytes" % n_bytes})


listener = socket.create_server(("127.0.0.1", 0))
with open(f"{sys.argv[1]}.port", "w") as file:
    file.write(str(listener.getsockname()[1]))
config = uvicorn.Config(count, http=sys.argv[1], lifespan="off", log_level="error")
uvicorn.Server(config).run([listener])
PYTHON

ask() {
	curl --silent --max-time 10 "$@" --data 123456789 "http://127.0.0.1:$(cat "$http.port")/"
}

for http in h11 httptools; do
	timeout 60 env/bin/python server.py $http &
	for _ in $(seq 100); do [ -s $http.port ] && break || sleep 0.1; done
	echo "$http, plain request: $(ask --http1.1)"
	echo "$http, request that offers an upgrade: $(ask --http2)"
done > seen
cat seen

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen
