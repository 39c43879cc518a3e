"""Questions to a folder of documents: python rag.py index FOLDER, then python rag.py ask QUESTION."""

import argparse
import hashlib
import os
import re
import sqlite3
import sys
import time
from pathlib import Path

import numpy as np
from openai import OpenAI

SUFFIXES = {".md", ".rst", ".txt"}
MOST_WORDS = 150  # of a chunk, marks counted: some 200 tokens. Small encoders read 512 at most
N_FOUND, N_READ = 16, 4  # chunks that a ranking model looks at, and those that the chat model reads
AT_ONCE = 64  # texts of one request
OTHERS = {"embeddings", "rerank", "classify"}  # capabilities of models that write no text
RULES = (
    "Answer the question from the numbered sources, in a few sentences, and name the sources that you "
    "used like [1]. If they do not answer it, say so."
)
client = OpenAI(
    base_url=os.environ.get("CORRAL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("CORRAL_API_KEY", "none"),
)


def index(database, folder, model):
    """Have the database know the files as they are now. Only those that changed are computed again."""
    known = dict(database.execute("SELECT path, digest FROM files"))
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES]
    n_files, n_chunks, began = 0, 0, time.monotonic()
    for path in paths:
        text = path.read_text(errors="replace")
        name = str(path.relative_to(folder))
        digest = hashlib.sha256(f"{model} {MOST_WORDS} {text}".encode()).hexdigest()
        if known.pop(name, None) == digest:
            continue
        chunks = list(chunks_of(text))
        vectors = embed(model, [f"{heading}\n{chunk}".strip() for heading, chunk in chunks])
        with database:  # a file is in it whole or not at all
            forget(database, name)
            database.execute("INSERT INTO files VALUES (?, ?, ?)", (name, digest, model))
            database.executemany(
                "INSERT INTO chunks VALUES (?, ?, ?, ?)",
                [(name, *chunk, vector) for chunk, vector in zip(chunks, vectors, strict=True)],
            )
        n_files, n_chunks = n_files + 1, n_chunks + len(chunks)
    with database:
        for name in known:  # is no longer there
            forget(database, name)
    (n_all,) = database.execute("SELECT count(*) FROM chunks").fetchone()
    seconds = time.monotonic() - began
    print(
        f"{n_files} of {len(paths)} files have changed: {n_chunks} chunks in {seconds:.1f} s; "
        f"{n_all} in all."
    )


def forget(database, name):
    for table in ("files", "chunks"):
        database.execute(f"DELETE FROM {table} WHERE path = ?", (name,))


def chunks_of(text):
    """Neighbouring paragraphs, as many as fit, each with the heading above them."""
    heading = chunk = ""
    for paragraph in re.split(r"\n\s*\n", text):
        if re.match("#+ ", paragraph):
            if chunk:
                yield heading, chunk
            first, _, paragraph = paragraph.partition("\n")
            heading, chunk = first.strip("# "), ""
        for part in parts_of(paragraph.strip()):
            if chunk and count_words(chunk) + count_words(part) > MOST_WORDS:
                yield heading, chunk
                chunk = ""
            chunk = f"{chunk}\n{part}" if chunk else part
    if chunk:
        yield heading, chunk


def parts_of(text):
    """The text in parts that are short enough: whole, its lines, or halves of a line."""
    if count_words(text) <= MOST_WORDS:
        return [text] if text else []
    lines = text.splitlines()
    if len(lines) == 1:
        lines = [text[: len(text) // 2], text[len(text) // 2 :]]
    return [part for line in lines for part in parts_of(line)]


def count_words(text):
    """Words and marks, which a tokenizer begins with."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def embed(model, texts):
    """The bytes of a vector of length 1 for each text. One that is too long after all is cut."""
    vectors = []
    for i in range(0, len(texts), AT_ONCE):
        answer = client.embeddings.create(
            model=model, input=texts[i : i + AT_ONCE], extra_body={"truncate_prompt_tokens": -1}
        )
        vectors += [np.array(item.embedding, np.float32).tobytes() for item in answer.data]
    return vectors


def ask(database, question, chat, rerank):
    """Print the answer as it comes, and its sources."""
    began = time.monotonic()
    chunks = database.execute("SELECT path, heading, text, vector FROM chunks").fetchall()
    if not chunks:
        sys.exit("The index is empty: python rag.py index FOLDER fills it.")
    (model,) = database.execute("SELECT model FROM files LIMIT 1").fetchone()
    asked, known = embed(model, [question])[0], b"".join(chunk[3] for chunk in chunks)
    vectors = np.frombuffer(known, np.float32).reshape(len(chunks), -1)
    likeness = vectors @ np.frombuffer(asked, np.float32)  # cosines
    found = [chunks[i] for i in np.argsort(-likeness)[:N_FOUND]]
    if rerank:
        documents = [f"{heading}\n{text}" for _, heading, text, _ in found]
        body = {"model": rerank, "query": question, "documents": documents, "truncate": True}
        ranked = client.post("/rerank", cast_to=dict, body=body)
        found = [found[one["index"]] for one in ranked["results"]]
    found, found_s = found[:N_READ], time.monotonic() - began
    sources = "\n\n".join(
        f"[{number}] {path}, {heading}:\n{text}"
        for number, (path, heading, text, _) in enumerate(found, 1)
    )
    first_s = 0.0
    for event in client.chat.completions.create(
        model=chat,
        messages=[
            {"role": "system", "content": RULES},
            {"role": "user", "content": f"{sources}\n\nQuestion: {question}"},
        ],
        temperature=0,
        max_tokens=300,
        stream=True,
    ):
        if event.choices and (text := event.choices[0].delta.content):
            first_s = first_s or time.monotonic() - began
            print(text, end="", flush=True)
    print("\n")
    for number, (path, heading, _, _) in enumerate(found, 1):
        print(f"[{number}] {path}: {heading}")
    all_s = time.monotonic() - began
    print(f"Found in {found_s:.2f} s, first token after {first_s:.2f} s, all in {all_s:.2f} s.")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default="rag.db", help="the file of the index")
    parser.add_argument("--embed", help="the model that makes vectors")
    parser.add_argument("--rerank", help="the model that ranks what is found")
    parser.add_argument("--chat", help="the model that answers")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("index").add_argument("folder", type=Path)
    commands.add_parser("ask").add_argument("question")
    args = parser.parse_args()
    able = {
        model.id: set(getattr(model, "capabilities", None) or ()) for model in client.models.list()
    }
    embedder = args.embed or next((name for name in able if "embeddings" in able[name]), None)
    rerank = args.rerank or next((name for name in able if "rerank" in able[name]), None)
    chat = args.chat or next((name for name in able if not able[name] & OTHERS), None)
    database = sqlite3.connect(args.index)
    database.execute("CREATE TABLE IF NOT EXISTS files (path PRIMARY KEY, digest, model)")
    database.execute("CREATE TABLE IF NOT EXISTS chunks (path, heading, text, vector)")
    if args.command == "index":
        index(database, args.folder, embedder or sys.exit("No model for embeddings is served."))
    else:
        ask(database, args.question, chat or sys.exit("No model for chats is served."), rerank)


if __name__ == "__main__":
    main()
