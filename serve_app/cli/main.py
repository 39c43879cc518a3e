"""The commands of `corral` and their options."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from serve_app import __version__
from serve_app.base.plugins import PLUGINS

if TYPE_CHECKING:
    from rich.console import Console

    from serve_app.cli.client import Client


class Commands(TyperGroup):
    """Commands whose errors for people are printed as they are, with exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            from serve_app.base.errors import ConfigError
            from serve_app.cli.client import ServerError

            is_broken_pipe = isinstance(error, BrokenPipeError)  # which Typer ends quietly
            if is_broken_pipe or not isinstance(error, (ConfigError, ServerError, OSError)):
                raise
            if isinstance(error, OSError) and error.filename is not None:
                _fail(f"{error.filename}: {error.strerror}")
            _fail(str(error))


app = typer.Typer(
    name="corral",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    epilog="Example: `corral serve` in one terminal, and `corral chat` in another.",
)
_RUN, _LOOK, _MEASURE = "Serve", "Use and watch a server", "Measure"
_OFFLINE = "Work without a server"
_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True}


def _setting(name: str, help: str, *flags: str, **options: Any) -> Any:  # noqa: A002
    """An option that the environment can give, too: as CORRAL_ and its name."""
    return typer.Option(*flags, envvar=f"CORRAL_{name}", help=help, **options)


_MODEL = (
    "A GGUF file, or a Hugging Face repository as OWNER/NAME or OWNER/NAME:QUANT. Without one, the small "
    "built-in model."
)
_HOST = "The address to listen on. 0.0.0.0 serves the network, and needs --api-key-file."
_SLOTS = "Requests of each model that run at once. By default, as many as suit cores and memory."
_CONTEXT = (
    "Most tokens of a request, prompt and answer together. By default as many as all "
    "slots hold, or the model takes. Slots share the memory for more."
)
_THREADS = "Threads that compute. By default, one for each physical core."
_KEYS = "A YAML file with the API keys that clients must send."
_ANONYMOUS = "Serve everybody who reaches the address, without API keys."
_WEB_APPS = (
    "Let pages of desktop apps, of editors and of this machine's own web servers use the API."
)
_MANAGE = (
    "Let operators add and remove models while serving, as with Ollama's pull. All models are then loaded "
    "on demand, one at a time."
)

Models = Annotated[list[str] | None, typer.Argument(metavar="MODEL", help=_MODEL)]
Host = Annotated[str, _setting("HOST", _HOST)]
Port = Annotated[int, _setting("PORT", "The TCP port.", min=1, max=65535)]
Slots = Annotated[int | None, _setting("SLOTS", _SLOTS, min=1)]
Context = Annotated[int | None, _setting("CONTEXT", _CONTEXT, min=2)]
Threads = Annotated[int | None, _setting("THREADS", _THREADS, min=1)]
KeyFile = Annotated[Path | None, _setting("API_KEY_FILE", _KEYS, metavar="FILE", readable=False)]
Anonymous = Annotated[bool, _setting("ALLOW_ANONYMOUS", _ANONYMOUS, "--allow-anonymous")]
WebApps = Annotated[bool, _setting("WEB_APPS", _WEB_APPS, "--web-apps")]
ManageModels = Annotated[bool, _setting("MANAGE_MODELS", _MANAGE, "--manage-models")]
Url = Annotated[str, _setting("URL", "The address of the server, with or without /v1.")]
ApiKey = Annotated[str | None, _setting("API_KEY", "The API key to send, if the server needs one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_URL = "http://127.0.0.1:8000"
_PIPE_WIDTH = 160
"""Columns of tables that go to a file or another program, which cut nothing off."""


def _print_version(is_shown: bool) -> None:
    if is_shown:
        typer.echo(f"corral {__version__}")
        raise typer.Exit


@app.callback()
def corral(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serves GGUF language models from CPU machines, behind the OpenAI API."""


@app.command(rich_help_panel=_RUN)
def serve(
    called: typer.Context,
    models: Models = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    slots: Slots = None,
    context: Context = None,
    threads: Threads = None,
    api_key_file: KeyFile = None,
    allow_anonymous: Anonymous = False,
    web_apps: WebApps = False,
    manage_models: ManageModels = False,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="CORRAL_CONFIG",
            metavar="FILE",
            help="A configuration file, instead of MODEL and the options above but --host and --port.",
        ),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Serve with Ray Serve, on which more machines can join. A configuration that asks for "
            "several replicas or autoscaling has it by itself.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print the server's log.")
    ] = False,
) -> None:
    """Serve models on this machine until Ctrl-C.

    Examples:

    * `corral serve` serves the small built-in model.
    * `corral serve ~/models/qwen3-4b-q4_k_m.gguf --slots 10 --context 8192`
    * `corral serve Qwen/Qwen3-4B-GGUF:Q4_K_M` downloads the file first.
    * `corral serve MODEL.gguf --host 0.0.0.0 --api-key-file keys.yaml` serves the network.
    * `corral serve --config serve_config.yaml`
    """
    from serve_app.cli import serve as server
    from serve_app.cli.config_file import ServeOptions

    sizes, access = (slots, context, threads), (api_key_file, allow_anonymous, web_apps)
    options = ServeOptions(tuple(models or ()), host, port, *sizes, *access, manage_models)
    http: dict[str, str | int] = {}
    if config is not None:
        sources = _sources(called)
        http = {name: called.params[name] for name in ("host", "port") if sources.pop(name, None)}
        if others := sources.keys() - {"config", "cluster", "verbose"}:
            name = sources[min(others)]
            _fail(f"--config cannot be combined with {name}: the file has all other settings.")
    how = {"cluster": cluster, "verbose": verbose}
    raise typer.Exit(server.run(options, config, _console(), **how, http=http))


def _sources(called: typer.Context) -> dict[str, str]:
    """The source of a parameter that is no default: the option, or the variable of the environment."""
    sources = {}
    for parameter in called.command.params:
        name = str(parameter.name)
        source = called.get_parameter_source(name)
        if source is not None and source.name == "ENVIRONMENT":
            sources[name] = str(parameter.envvar)
        elif source is not None and source.name == "COMMANDLINE":
            sources[name] = "MODEL" if name == "models" else parameter.opts[0]
    return sources


@app.command("config", rich_help_panel=_RUN)
def print_config(
    models: Models = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    slots: Slots = None,
    context: Context = None,
    threads: Threads = None,
    api_key_file: KeyFile = None,
    allow_anonymous: Anonymous = False,
) -> None:
    """Print the configuration file that `corral serve` would use with the same options.

    Example: `corral config MODEL.gguf > serve_config.yaml`, change it, and `corral serve --config
    serve_config.yaml`.
    """
    from serve_app.cli import config_file

    sizes, access = (slots, context, threads), (api_key_file, allow_anonymous)
    options = config_file.ServeOptions(tuple(models or ()), host, port, *sizes, *access)
    typer.echo(config_file.text(config_file.document(options)), nl=False)


@app.command(rich_help_panel=_RUN)
def check(file: Annotated[Path, typer.Argument(help="A configuration file.")]) -> None:
    """Check a configuration file, and the files of its models on this machine, without starting anything.

    Example: `corral check serve_config.yaml`
    """
    from serve_app.cluster.serve_check import check_serve
    from serve_app.config import schema
    from serve_app.run.resolving import check_files

    application = schema.load(file)
    check_serve(application, file)
    logging.getLogger("corral.llama").setLevel(logging.CRITICAL)  # the problem says the same
    if problems := check_files(application):
        _fail("\n".join(f"{file}: models ({name}): {why}" for name, why in problems.items()))
    typer.echo(f"{file} is valid. Models: {', '.join(model.id for model in application.models)}")


@app.command("hash-keys", rich_help_panel=_RUN)
def hash_keys(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file with API keys.")],
) -> None:
    """Replace the API keys in a file by their hashes, which cannot be used as keys.

    Clients keep their keys. A server that runs reads the file again.

    Example: `corral hash-keys keys.yaml`
    """
    from serve_app.server.access.api_keys import hash_keys

    n_keys = hash_keys(file)
    typer.echo(f"{file}: {n_keys} API keys were replaced by their hashes.")


@app.command(rich_help_panel=_LOOK)
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="A question. Without one, a chat begins.")
    ] = None,
    url: Url = _URL,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="The model. By default, the server's first.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of an answer.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")
    ] = None,
) -> None:
    """Chat in the terminal with this server, or any other that speaks the OpenAI API.

    Examples:

    * `corral chat`
    * `corral chat "Write a haiku about barns." --max-tokens 64`
    * `corral chat --url https://llm.example --api-key "$KEY" --model qwen3-4b`
    """
    from serve_app.cli.chat import ChatSession, ask, converse

    client, console = _client(url, api_key), _console()
    fields = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = {name: value for name, value in fields.items() if value is not None}
    model = model or next(iter(client.models()), None)
    if model is None:
        _fail(f"{client.url} serves no model.")
    conversation = ChatSession(model, system, sampling)
    if prompt is None:
        converse(client, conversation, console)
    else:
        ask(client, conversation, prompt, console)


@app.command(rich_help_panel=_LOOK)
def ps(url: Url = _URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the models and replicas of a server.

    Example: `corral ps --url http://10.0.0.7:8000 --api-key "$KEY"`
    """
    from serve_app.cli import live

    live.ps(_client(url, api_key), _console(), as_json=as_json)


@app.command(rich_help_panel=_LOOK)
def stats(url: Url = _URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Print how fast a server is and how long requests wait, measured over a few seconds.

    Example: `corral stats --json`
    """
    from serve_app.cli import live

    live.show_stats(_client(url, api_key), _console(), as_json=as_json)


@app.command(rich_help_panel=_LOOK)
def top(
    url: Url = _URL,
    api_key: ApiKey = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Stop after so many seconds.")] = None,
) -> None:
    """Show what a server does, once a second, until Ctrl-C.

    Example: `corral top`
    """
    from serve_app.cli import live

    with suppress(KeyboardInterrupt):
        live.top(_client(url, api_key), _console(), frames)


@app.command(rich_help_panel=_LOOK)
def usage(
    days: Annotated[int, typer.Option(min=1, max=366, help="Days, today among them.")] = 7,
    by: Annotated[str, typer.Option(help="Columns: key, model, endpoint, batch.")] = "key,model",
    url: Url = _URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a table for spreadsheets.")] = False,
) -> None:
    """Print what was used by day. Operators see all API keys, others their own.

    Examples:

    * `corral usage --days 30`
    * `corral usage --by model --csv > usage.csv`
    """
    from serve_app.cli import usage as command

    groups = [name.strip() for name in by.split(",") if name.strip()]
    if unknown := [name for name in groups if name not in command.GROUPS]:
        _fail(f"--by: {unknown[0]!r} is none of {', '.join(command.GROUPS)}.")
    form = "csv" if as_csv else "json" if as_json else "table"
    command.show_usage(_client(url, api_key), _console(), days, groups, form=form)


keys = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="Make, list and revoke API keys.\n\nExample: `corral keys create ana --days 90`",
)
app.add_typer(keys, rich_help_panel=_LOOK)
KeyName = Annotated[str, typer.Argument(help="The name of the key's owner.")]


@keys.command("create")
def create_key(
    name: KeyName,
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD=VALUE]...", help="Fields of a key file's entry; values are YAML."
        ),
    ] = None,
    days: Annotated[int | None, typer.Option(min=1, help="Days until the key expires.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="A label, as NAME=TEXT.")] = None,
    url: Url = _URL,
    api_key: ApiKey = None,
) -> None:
    """Make an API key, and print its secret, which is shown only once.

    Examples:

    * `corral keys create ana --days 90 --label team=search`
    * `corral keys create ben tokens_per_minute=60000 'models=[qwen3-4b]'`
    """
    import yaml

    from serve_app.cli import usage as command

    fields: dict[str, Any] = {"name": name}
    fields |= {field: yaml.safe_load(value) for field, value in _parse_pairs(limits).items()}
    if days is not None:
        fields["expires"] = (datetime.now(UTC) + timedelta(days)).isoformat()
    if label:
        fields["labels"] = _parse_pairs(label)
    command.make_key(_client(url, api_key), _console(), fields)


@keys.command("list")
def list_keys(url: Url = _URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List all API keys with their limits. Secrets are not kept anywhere."""
    from serve_app.cli import usage as command

    command.show_keys(_client(url, api_key), _console(), as_json=as_json)


@keys.command("revoke")
def revoke_key(name: KeyName, url: Url = _URL, api_key: ApiKey = None) -> None:
    """Revoke an API key that `corral keys create` made."""
    from serve_app.cli import usage as command

    command.withdraw_key(_client(url, api_key), _console(), name)


@keys.command("rotate")
def rotate_key(name: KeyName, url: Url = _URL, api_key: ApiKey = None) -> None:
    """Give an API key another secret, and print it. The one before is not valid any more."""
    from serve_app.cli import usage as command

    command.renew_key(_client(url, api_key), _console(), name)


def _parse_pairs(texts: list[str] | None) -> dict[str, str]:
    """Texts such as `a=b`, by what is before the sign."""
    for text in texts or ():
        if "=" not in text:
            _fail(f"{text!r} has no sign: write NAME=VALUE.")
    return dict(text.split("=", 1) for text in texts or ())


@app.command(rich_help_panel=_OFFLINE, context_settings=_FORWARDED, add_help_option=False)
def batch(context: typer.Context) -> None:
    """Answer a file of requests, or a column of a table. No server is needed."""
    _forward(context, PLUGINS["batch"], needs=("pyarrow", "pandas"))


@app.command(rich_help_panel=_MEASURE, context_settings=_FORWARDED, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure the engine alone, without HTTP: tokens a second by the number of sequences."""
    _forward(context, "serve_app.cli.measure.bench")


@app.command(rich_help_panel=_MEASURE, context_settings=_FORWARDED, add_help_option=False)
def tune(context: typer.Context) -> None:
    """Find the format, threads and cache with which this machine serves a model fastest."""
    _forward(context, "serve_app.cli.measure.tune")


@app.command(rich_help_panel=_MEASURE, context_settings=_FORWARDED, add_help_option=False)
def capacity(context: typer.Context) -> None:
    """Find how many users a server holds within an SLO."""
    _forward(context, "serve_app.cli.measure.capacity")


def _forward(context: typer.Context, module: str, needs: Sequence[str] = ()) -> NoReturn:
    """Run a program with the command's arguments, its help among them, and exit as it does. `needs` are
    packages of the extra with the command's name, which its help does without."""
    needs = () if {"-h", "--help"} & {*context.args} else needs
    if missing := [name for name in needs if importlib.util.find_spec(name) is None]:
        _fail(
            f"This command needs {' and '.join(missing)}. To install what it needs, run: "
            f"{sys.executable} -m pip install 'corral[{context.info_name}]'"
        )
    raise typer.Exit(_run(module, context.args))


def _run(module: str, arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-P", "-m", module, *arguments], check=False).returncode


def _client(url: str, api_key: str | None) -> Client:
    from serve_app.cli.client import Client

    return Client(url, api_key)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)
