"""Where clients are installed: beside `.venv`, and not in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-clients"
NODE = FOLDER / "node"
HERE = Path(__file__).parent
RECIPES = sorted([*(HERE / "recipes").glob("*.py"), *(HERE / "recipes").glob("*.mjs")])
REQUIREMENTS = HERE / "requirements.txt"
"""Of Python packages, in one environment."""
APART = tuple(sorted(path.stem for path in (HERE / "apart").glob("*.txt")))
"""Environments of those that go with no others; the recipes' names begin with theirs."""
NODE_REQUIREMENTS = HERE / "package.json"


def interpreter(recipe: Path) -> str:
    """What runs it."""
    if recipe.suffix == ".mjs":
        return str(NODE / "node_modules" / ".bin" / "node")
    own = next((name for name in APART if recipe.stem.startswith(name)), ".")
    return str(FOLDER / own / "bin" / "python")
