"""The sums, the table and the prompts of the HTTP comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.common.bursts import FIGURES, Burst
from loadtests.compare import __main__, llama_server, vllm
from loadtests.compare import report as peer_report
from loadtests.compare.__main__ import Record, Settings, by_point, parse_args, report, requests
from loadtests.compare.requests import (
    MAX_TOKENS,
    WORKLOADS,
    Words,
    draw_prompts,
    openai_request,
    request,
)
from loadtests.compare.sides import SIDES, is_url
from serve_app.cli.measure.benchmark import BenchmarkError
from serve_app.cli.measure.outcomes import StreamedAnswer

VOCABULARY = range(1000, 2000)


def answer(
    *pieces_s: float, tokens: int = 4, prompt: int | None = 8, error: str | None = None
) -> StreamedAnswer:
    return StreamedAnswer(
        pieces_s, pieces_s[-1] if pieces_s else 0.0, tokens, True, prompt, 0, error
    )


def burst(*answers: StreamedAnswer, wall_s: float = 2.0) -> Burst:
    return Burst(answers, wall_s, client_cpu_s=0.25)


def test_figures_of_a_burst() -> None:
    measured = burst(answer(1.0, 1.25, 1.5), answer(2.0, 3.0, tokens=2), wall_s=3.0)
    assert measured.tokens == 6
    assert measured.client_share == pytest.approx(1 / 12)
    figures = measured.figures()
    assert list(figures) == list(FIGURES)
    assert figures["tokens_per_s"] == 2.0
    assert figures["ttft_p50_s"] == 1.5
    assert figures["ttft_p95_s"] == pytest.approx(1.95)
    assert figures["itl_p50_ms"] == 250
    assert figures["itl_p99_ms"] == pytest.approx(985)


def test_answers_without_text_do_not_count_in_latencies() -> None:
    figures = burst(answer(1.0, 1.5), answer(tokens=0, error="broken")).figures()
    assert (figures["ttft_p50_s"], figures["itl_p50_ms"]) == (1.0, 500)
    assert figures["tokens_per_s"] == 2.0


@pytest.mark.parametrize("nothing", [burst(), burst(answer(tokens=0)), burst(answer(1.0))], ids=str)
def test_a_burst_without_streams_has_no_figures(nothing: Burst) -> None:
    with pytest.raises(BenchmarkError, match="No stream"):
        nothing.figures()


def test_raw_figures_are_json() -> None:
    raw = json.loads(json.dumps(burst(answer(1.0, 1.5)).raw()))
    assert raw["answers"][0]["pieces_s"] == [1.0, 1.5]
    assert (raw["tokens"], raw["tokens_per_s"], raw["client_share"]) == (4, 2.0, 0.125)


def rounds(*walls: tuple[float, float]) -> list[dict[str, Burst]]:
    """Corral's and llama-server's seconds for the same 4 tokens."""
    return [
        {
            "corral": burst(answer(1.0, 1.5), wall_s=ours),
            "llama-server": burst(answer(1.0, 1.25), wall_s=theirs),
        }
        for ours, theirs in walls
    ]


def test_ratios_compare_within_a_round() -> None:
    three = rounds((1.0, 2.0), (4.0, 4.0), (2.0, 1.0))
    assert peer_report.of_side(three, "corral", "tokens_per_s") == [4.0, 1.0, 2.0]
    assert peer_report.cell(three, "corral", "tokens_per_s") == "2.0, 1.00x (0.50-2.00)"
    assert peer_report.cell(three, "corral", "itl_p50_ms") == "500.0, 2.00x (2.00-2.00)"
    assert peer_report.cell(three, "llama-server", "tokens_per_s") == "2.0"


def test_without_llama_server_ratios_are_to_the_first_side() -> None:
    slow, fast = burst(answer(1.0, 1.5)), burst(answer(1.0, 1.5), wall_s=1.0)
    alone = [{"corral": slow}]
    assert peer_report.cell(alone, "corral", "tokens_per_s") == "2.0"
    two = [{"corral": slow, "http://h:1": fast}]
    assert peer_report.cell(two, "corral", "tokens_per_s") == "2.0"
    assert peer_report.cell(two, "http://h:1", "tokens_per_s") == "4.0, 2.00x (2.00-2.00)"
    assert peer_report.baseline(["corral", "llama-server"]) == "llama-server"


def test_no_ratio_to_zero() -> None:
    coalesced = burst(answer(1.0, 1.0))
    one = [{"corral": burst(answer(1.0, 1.5)), "llama-server": coalesced}]
    assert peer_report.cell(one, "corral", "itl_p50_ms") == "500.0"


def test_table_has_a_row_for_each_side_and_number_of_users() -> None:
    one = rounds((1.0, 2.0))
    fewer = [*one, {**one[0], "corral": burst(answer(1.0, 1.5, tokens=3))}]
    lines = peer_report.table({1: one, 4: fewer}).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| 1", "corral"],
        ["| 1", "llama-server"],
        ["| 4", "corral"],
        ["| 4", "llama-server"],
    ]
    assert {line.count("|") for line in lines} == {10}
    assert lines[2].endswith("| - | 4 |")
    assert lines[4].endswith("| - | 3-4 |")


def test_cpu_time_beside_computing_is_by_token() -> None:
    (one,) = rounds((1.0, 2.0))
    more = {side: replace(found, beside_cpu_s=0.004) for side, found in one.items()}
    less = {side: replace(found, beside_cpu_s=0.002) for side, found in one.items()}
    assert peer_report.beside([more, less, more], "corral") == "1.00 (0.50-1.00)"
    assert peer_report.beside([one], "corral") == "-"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (answer(1.0, 1.5, tokens=3), "corral answered 7 tokens of 8"),
        (answer(1.0, 1.5, error="cut"), "corral: cut"),
        (answer(1.0, 1.5, prompt=9), "corral counts other prompts: [8, 9]"),
    ],
    ids=["fewer", "error", "prompt"],
)
def test_what_is_not_fair_is_said(wrong: StreamedAnswer, message: str) -> None:
    right = burst(answer(1.0, 1.5), answer(1.0, 1.5))
    wanted = [(8, 4)] * 2
    assert list(peer_report.warnings({"llama-server": right}, wanted)) == []
    one = {"llama-server": right, "corral": burst(answer(1.0, 1.5), wrong)}
    (found,) = peer_report.warnings(one, wanted)
    assert found.startswith(message)


def test_a_side_that_tells_no_usage_is_warned_of_if_it_ended_early() -> None:
    whole = StreamedAnswer((1.0, 1.2, 1.4, 1.5), 1.5, 4, False, None, None, None)
    short = StreamedAnswer((1.0, 1.2, 1.5), 1.5, 3, False, None, None, None)
    wanted = [(8, 4)] * 2
    assert list(peer_report.warnings({"http://h:1": burst(whole, whole)}, wanted)) == []
    (found,) = peer_report.warnings({"http://h:1": burst(whole, short)}, wanted)
    assert found == "http://h:1 answered 7 tokens of 8"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_prompts_share_what_they_should(workload: str) -> None:
    n_shared, n_own = WORKLOADS[workload]
    prompts = draw_prompts(VOCABULARY, 1, workload, 3)
    assert {len(prompt) for prompt in prompts} == {n_shared + n_own}
    assert len({prompt[:n_shared] for prompt in prompts}) == 1
    assert len({prompt[n_shared : n_shared + 8] for prompt in prompts}) == 3
    assert all(token in VOCABULARY for prompt in prompts for token in prompt)


def test_prompts_are_the_same_for_all_sides_and_fresh_in_every_burst() -> None:
    drawn = [
        draw_prompts(VOCABULARY, number, workload, users)
        for number in (1, 2)
        for workload in WORKLOADS
        for users in (1, 4)
    ]
    assert draw_prompts(VOCABULARY, 1, "shared", 1) == drawn[0]
    beginnings = {prompts[0][:8] for prompts in drawn}
    assert len(beginnings) == len(drawn)


def test_a_request_streams_and_asks_for_counts() -> None:
    body = request((1, 2), 5)
    assert json.loads(json.dumps(body))["prompt"] == [1, 2]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["seed"]) == (MAX_TOKENS, True, 5)


def test_any_openai_server_gets_the_same_words_and_is_kept_from_ending() -> None:
    words = Words({1: " a", 2: " word"}, eog=[7, 9])
    body = json.loads(json.dumps(openai_request((2, 1, 2), 5, words, "m")))
    assert (body["prompt"], body["model"]) == (" word a word", "m")
    assert body["logit_bias"] == {"7": -100, "9": -100}
    same = ("max_tokens", "seed", "stream", "stream_options")
    assert {key: body[key] for key in same} == {key: request((), 5)[key] for key in same}
    assert set(body) == {"prompt", "model", "logit_bias", *same}


def test_all_sides_of_a_round_are_asked_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Words({token: f" w{token}" for token in VOCABULARY}, eog=[7])
    monkeypatch.setattr(__main__, "first_model", {"http://h:1": "theirs"}.__getitem__)
    ours = requests("corral", "http://h:2", words, 1, ("shared", 2))
    theirs = requests("http://h:1", "http://h:1", words, 1, ("shared", 2))
    assert [body["model"] for body in theirs] == ["theirs"] * 2
    texts = ["".join(words.tokens[token] for token in body["prompt"]) for body in ours]
    assert [body["prompt"] for body in theirs] == texts


def settings() -> Settings:
    return Settings(
        model=Path("m.gguf"),
        workloads=("independent",),
        users=(1,),
        rounds=2,
        sides=("corral", "llama-server"),
        threads=2,
        server=Path("llama-server"),
    )


def records() -> list[Record]:
    """Two rounds, the second in the other order."""
    n_prompt = sum(WORKLOADS["independent"])
    whole = burst(answer(1.0, 1.5, tokens=MAX_TOKENS, prompt=n_prompt))
    short = burst(answer(1.0, 1.5, tokens=MAX_TOKENS - 1, prompt=n_prompt))
    turns = [(1, "corral", whole), (1, "llama-server", whole)]
    turns += [(2, "llama-server", whole), (2, "corral", short)]
    return [Record(number, side, "independent", 1, found) for number, side, found in turns]


def test_rounds_are_put_together_whatever_the_order() -> None:
    (found,) = by_point(records(), settings())["independent"].values()
    assert [list(one) for one in found] == [["corral", "llama-server"]] * 2
    assert [one["corral"].tokens for one in found] == [64, 63]


def test_report() -> None:
    facts = {"cpu": "A CPU", "cores": 2, "model": "m.gguf", "model_mb": 3, "max_tokens": 64}
    facts |= {"models": {"http://h:1": "theirs"}, "engine": {"kv_unified": True}}
    lines = report(facts, records(), settings()).splitlines()
    assert lines[0] == "A CPU, 2 cores, m.gguf (3 MB), 64 tokens for each user."
    assert "http://h:1 serves theirs." in lines
    assert 'Corral\'s engine has {"kv_unified": true}.' in lines
    assert any("ratios to llama-server in the same round" in line for line in lines)
    assert "The client used 12.5% of a core at most." in lines
    assert "independent: 0 shared tokens, 128 of their own" in lines
    assert any(line.startswith("| users | side | tokens/s | TTFT p50, s |") for line in lines)
    assert lines[-1] == ("WARNING: independent, 1 users, round 2: corral answered 63 tokens of 64")


def test_a_side_that_does_not_count_is_told_of_once() -> None:
    alone = replace(settings(), sides=("llama-cpp-python",))
    texts = burst(StreamedAnswer((1.0, 1.5), 1.5, MAX_TOKENS, False, None, None, None))
    both = [Record(number, "llama-cpp-python", "independent", 1, texts) for number in (1, 2)]
    facts = {"cpu": "C", "cores": 2, "model": "m", "model_mb": 3, "max_tokens": 64, "models": {}}
    facts["engine"] = {}
    warned = [line for line in report(facts, both, alone).splitlines() if "WARNING" in line]
    assert warned == [
        "WARNING: llama-cpp-python does not count all its tokens: events with text are counted instead"
    ]


@pytest.mark.parametrize(
    "bad",
    [
        ["--users", "0"],
        ["--users", "257"],
        ["--slots", "65"],
        ["--users", "1,x"],
        ["--rounds", "0"],
        ["--sides", "corral,ollama"],
        ["--sides", "corral,http://h:1/v1"],
        ["--sides", "http://"],
        ["--sides", "h:8080"],
        ["--workloads", ""],
        ["--server", "/nowhere/llama-server"],
        ["--engine", "[1]"],
        ["--engine", "x"],
    ],
    ids=repr,
)
def test_arguments_are_checked(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--model", "m.gguf", *bad])
    assert bad[0] in capsys.readouterr().err


def test_arguments() -> None:
    line = "--model m.gguf --users 2,3 --sides ray,corral --workloads shared --json out"
    found, json_file = parse_args([*line.split(), "--engine", '{"kv_unified": true}'])
    assert found.engine == {"kv_unified": True}
    assert found.points == [("shared", 2), ("shared", 3)]
    assert found.sides == ("ray", "corral")
    assert found.model.is_absolute()
    assert json_file == Path("out")


def test_a_url_is_a_side() -> None:
    line = "--model m.gguf --sides corral,http://127.0.0.1:8080/,https://host,corral"
    found, _ = parse_args(line.split())
    assert found.sides == ("corral", "http://127.0.0.1:8080", "https://host")
    assert not any(map(is_url, SIDES))


def test_the_batched_example_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    line = ["--model", "m.gguf", "--sides", "llama-cpp-python-batched"]
    with pytest.raises(SystemExit):
        parse_args(line)
    assert "run python -m loadtests.compare.llama_server" in capsys.readouterr().err
    llama_server.folder().mkdir(parents=True)
    (llama_server.folder() / llama_server.BATCHED_SERVER).touch()
    assert parse_args(line)[0].sides == ("llama-cpp-python-batched",)


def test_vllm_must_have_the_weights_of_this_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tmp_path / "m.gguf"
    model.write_bytes(b"first")
    line = ["--model", str(model), "--sides", "vllm"]
    with pytest.raises(SystemExit):
        parse_args(line)
    assert f"run python -m loadtests.compare.vllm --model {model}" in capsys.readouterr().err
    for form in vllm.FORMS:
        vllm.weights(model, form).mkdir(parents=True)
    assert parse_args(line)[0].sides == ("vllm",)
    model.write_bytes(b"another file of this name")
    with pytest.raises(SystemExit):
        parse_args(line)
