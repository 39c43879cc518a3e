"""`python -m serve_app.cli` is `corral`."""

from serve_app.cli.main import app

app(prog_name="corral")
