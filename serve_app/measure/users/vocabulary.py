"""The texts of the load tests' users: words, lines of code, a system prompt with tools."""

from __future__ import annotations

_WORDS = """
a the of and to in is you that it he was for on are as with his they at be this have from or one had by
word but not what all were we when your can said there use each which she do how their if will up other
about out many then them these so some her would make like him into time has look two more write go see
number no way could people my than first water been call who oil its now find long down day did get come
made may part house river book table green small large city road letter music story friend morning night
winter summer garden window bread paper stone light mountain king fox bird apple question answer plan
"""
WORDS = tuple(_WORDS.split())
"""Common and short, as most words of most texts are."""

CODE = (
    "def mean(values: list[float]) -> float:",
    "    return sum(values) / len(values)",
    "for name, value in sorted(table.items()):",
    "    print(f'{name}: {value:.2f}')",
    "class Queue:",
    "    def __init__(self, size: int) -> None:",
    "        self._items: list[str] = []",
    "with open(path, encoding='utf-8') as file:",
    "    lines = [line.strip() for line in file]",
    "if not lines or lines[0].startswith('#'):",
    "    raise ValueError('no header in the first line')",
    "while low < high and items[low] <= pivot:",
    "result = {key: len(group) for key, group in groups.items()}",
    "assert response.status_code == 200, response.text",
)

TOOLS = """You are an agent. Answer with one JSON object: {"tool": NAME, "arguments": {...}}. Your tools:
search(query, limit): looks for pages that hold the words of the query, the best of them first.
read(address, first_line, last_line): gives the lines of a page, or of a file in the project.
write(path, text): puts the text into a file of the project, in the place of what was there.
run(command, timeout_s): runs a command in the project and gives what it prints and its exit status.
ask(question): asks the person who gave the task, and waits for what they say.
done(summary): ends the task, and says in a few words what was found, what was made and what is left.
Use one tool at a time. Read before you write. Never run what removes files. When a command fails, read
what it printed and try another way, three times at most; then ask. Say done when nothing is left to do."""
