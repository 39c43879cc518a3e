"""The `cohere` package: rankings and embeddings of Cohere's second API."""

from __future__ import annotations

import base64
import struct
import sys

import cohere

URL = sys.argv[1]
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]

client = cohere.ClientV2(api_key="none", base_url=URL)
documents = ["In Portugal.", "", "A fox. " * 3000]
ranked = client.rerank(model="ranker", query="Where is Lisbon?", documents=documents, top_n=2)
assert ranked.id
assert ranked.meta.billed_units.search_units == 1
assert len(ranked.results) == 2
scores = [result.relevance_score for result in ranked.results]
assert scores == sorted(scores, reverse=True)
assert all(0 <= score <= 1 for score in scores)

made = client.embed(
    model="demo", input_type="search_document", texts=["the fox", "a cat"], embedding_types=TYPES
)
assert made.id
assert made.meta.billed_units.input_tokens > 0
vectors = made.embeddings
for numbers, packed, small in zip(vectors.float_, vectors.base64, vectors.int8, strict=True):
    assert abs(sum(number * number for number in numbers) - 1) < 1e-3
    unpacked = struct.unpack(f"<{len(numbers)}f", base64.b64decode(packed))
    assert max(abs(a - b) for a, b in zip(numbers, unpacked, strict=True)) < 1e-6
    assert max(abs(127 * a - b) for a, b in zip(numbers, small, strict=True)) < 1
assert len(vectors.binary[0]) == len(vectors.ubinary[0]) == len(vectors.float_[0]) // 8
inputs = [{"content": [{"type": "text", "text": "the fox"}]}]
short = client.embed(model="demo", input_type="search_query", inputs=inputs, output_dimension=8)
assert len(short.embeddings.float_[0]) == 8
try:
    client.embed(model="demo", input_type="x", texts=["fox " * 9000], truncate="NONE")
except cohere.BadRequestError:
    pass
else:
    raise AssertionError("A text that is too long was taken.")
