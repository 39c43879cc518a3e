"""How the page reads event streams, in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
SOURCE = Path(__file__).parents[4] / "serve_app" / "ui" / "common" / "api.js"
READ = """
const [source, ...reads] = JSON.parse(process.argv[1]);
globalThis.sessionStorage = globalThis.localStorage = { getItem: () => null };
globalThis.document = { baseURI: "http://127.0.0.1/" };
const body = new ReadableStream({
  start(controller) {
    for (const read of reads) controller.enqueue(new TextEncoder().encode(read));
    controller.close();
  },
});
globalThis.fetch = async () => new Response(body);
const { events } = await import(`data:text/javascript,${encodeURIComponent(source)}`);
const found = [];
for await (const event of events("v1/x")) found.push(event);
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(NODE is None, reason="no Node here")
@pytest.mark.parametrize(
    "reads",
    [
        [': ping\n\ndata: {"a":1}\n\n: ping\n\n: ping\n\ndata: {"a":2}\n\ndata: [DONE]\n\n'],
        [": pi", "ng\n", '\ndata: {"a":1}\n\n: ping', "\n\nda", 'ta: {"a":2}\n\n: ping\n\n'],
    ],
)
def test_pings_are_no_events(reads: list[str]) -> None:
    asked = json.dumps([SOURCE.read_text(), *reads])
    command = [str(NODE), "--input-type=module", "-e", READ, asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [{"a": 1}, {"a": 2}]
