#!/usr/bin/env bash
# Over HTTP/2, httpx never tells the server that a stream was left, and one request's timeout ends all others.
#
# Version: httpx 0.28.1, httpx2 2.16.2 (PyPI; openai and anthropic use httpx2), with h2 4.4.1
# Behaviour: With `http2=True`, a stream that is closed early, or a request that times out, sends no RST_STREAM. The connection
# stays for others, so the server goes on. If one request times out, all requests of its connection raise its ReadTimeout.
# Seen:
#   httpx 0.28.1, HTTP/1.1: a stream is left: the server is told
#   httpx 0.28.1, HTTP/1.1: beside it, another request times out: the stream comes whole
#   httpx 0.28.1, HTTP/2: a stream is left: the server is not told
#   httpx 0.28.1, HTTP/2: beside it, another request times out: the stream ends with ReadTimeout
#   httpx2 2.16.2, HTTP/1.1: a stream is left: the server is told
#   httpx2 2.16.2, HTTP/1.1: beside it, another request times out: the stream comes whole
#   httpx2 2.16.2, HTTP/2: a stream is left: the server is not told
#   httpx2 2.16.2, HTTP/2: beside it, another request times out: the stream ends with ReadTimeout
set -euo pipefail
packages="httpx[http2]==0.28.1 httpx2[http2]==2.16.2 h2==4.4.1"
[ -z "${NEWEST-}" ] || packages=$(sed 's/==[^ ]*//g' <<< "$packages")

own=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv --without-pip env &&
	python3 -m pip --python env/bin/python install -qq --no-compile $packages || exit 2

timeout 100 env/bin/python - <<'PYTHON' | tee seen
import socket
import threading

import h2.config
import h2.connection
import h2.events
import httpx
import httpx2

PIECE = b"data: piece\n\n"


class Connection(threading.Thread):
    """/silent never answers. /stream sends a piece, and the end when `ends` is set."""

    def __init__(self, connection):
        super().__init__(daemon=True)
        self.connection, self.was_told = connection, False
        self.paths = {}
        self.ends = threading.Event()

    def write(self, data):
        self.connection.sendall(data)


class One(Connection):
    def run(self):
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.connection.recv(65536)
        if b" /stream " in head:
            chunk = b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
            self.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk)
            threading.Thread(target=self.end, daemon=True).start()
        try:
            self.was_told = not self.connection.recv(65536)
        except ConnectionError:
            self.was_told = True

    def end(self):
        if self.ends.wait(20):
            self.write(b"0\r\n\r\n")


class Two(Connection):
    def run(self):
        config = h2.config.H2Configuration(client_side=False)
        self.state, self.lock = h2.connection.H2Connection(config), threading.Lock()
        self.state.initiate_connection()
        self.write(self.state.data_to_send())
        while data := self.connection.recv(65536):
            with self.lock:
                for event in self.state.receive_data(data):
                    self.handle(event)
                self.write(self.state.data_to_send())

    def handle(self, event):
        if isinstance(event, h2.events.StreamReset):
            self.was_told = True
        if isinstance(event, h2.events.RequestReceived):
            number, path = event.stream_id, dict(event.headers)[b":path"]
            if path == b"/stream":
                self.state.send_headers(number, [(":status", "200")])
                self.state.send_data(number, PIECE)
                threading.Thread(target=self.end, args=(number,), daemon=True).start()

    def end(self, number):
        if self.ends.wait(20):
            with self.lock:
                self.state.end_stream(number)
                self.write(self.state.data_to_send())


def serve(kind):
    connections, server = [], socket.create_server(("127.0.0.1", 0))

    def accept():
        while True:
            connections.append(kind(server.accept()[0]))
            connections[-1].start()

    threading.Thread(target=accept, daemon=True).start()
    return connections, f"http://127.0.0.1:{server.getsockname()[1]}"


for library in (httpx, httpx2):
    for kind, name, options in ((One, "HTTP/1.1", {}), (Two, "HTTP/2", {"http1": False, "http2": True})):
        title = f"{library.__name__} {library.__version__}, {name}"
        connections, url = serve(kind)
        with library.Client(timeout=20, trust_env=False, **options) as client:
            with client.stream("GET", f"{url}/stream") as answer:
                next(answer.iter_bytes())
            threading.Event().wait(2)
            told = "told" if any(one.was_told for one in connections) else "not told"
            print(f"{title}: a stream is left: the server is {told}")
        connections, url = serve(kind)
        with library.Client(timeout=20, trust_env=False, **options) as client:
            with client.stream("GET", f"{url}/stream") as answer:
                pieces = answer.iter_bytes()
                next(pieces)
                try:
                    client.get(f"{url}/silent", timeout=1)
                except library.ReadTimeout:
                    pass
                for one in connections:
                    one.ends.set()
                try:
                    list(pieces)
                    end = "comes whole"
                except Exception as error:
                    end = f"ends with {type(error).__name__}"
            print(f"{title}: beside it, another request times out: the stream {end}", flush=True)
PYTHON

sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen
