"""What `corral tune` compares, and what it advises."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from serve_app.cli.measure import quality
from serve_app.cli.measure.bench import engine_options
from serve_app.cli.measure.quality import WINDOW, TextReading
from serve_app.cli.measure.tune import (
    AS_GIVEN,
    MeasuredSpeed,
    TuneLoad,
    Variant,
    advice,
    backend_and_options,
    eligible,
    fastest,
    formats_table,
    parse_args,
    text_prompts,
    ways,
)

GIVEN = Variant(AS_GIVEN, Path("m.gguf"))
SMALL = Variant("Q4_0", Path("m-Q4_0.gguf"))
LOAD = TuneLoad(sequences=(1, 4), prompt_tokens=8, max_tokens=8, rounds=2, threads=2)


def reading(perplexity: float, *choices: int) -> TextReading:
    return TextReading(-math.log(perplexity) * len(choices), choices)


def test_ways_change_one_setting_at_a_time() -> None:
    draft = {"source": {"path": "small.gguf"}}
    default, *others = ways(SMALL, n_physical=4, n_logical=8, drafts=[draft])
    assert default == SMALL
    assert [other.settings for other in others] == [
        {"backend": "openvino"},
        {"threads": 2},
        {"threads": 8},
        {"draft": draft},
        {"flash_attn": False},
        {"kv_unified": True},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    ]
    assert {(other.format, other.path) for other in others} == {("Q4_0", SMALL.path)}
    assert others[4].name == "Q4_0, flash_attn: false"


def test_one_core_has_no_fewer_threads() -> None:
    assert [way.settings.get("threads") for way in ways(GIVEN, 1, 1)] == [None] * 5


def test_a_variants_engine() -> None:
    options = engine_options(4, 8, 8, threads=1, kv_unified=True)
    assert (options.n_slots, options.n_ctx_slot, options.threads) == (4, 17, 1)
    assert (options.kv_unified, options.flash_attn, options.profile_limit_s) == (True, True, 0)


def test_a_variant_is_profiled_as_in_a_server() -> None:
    settings = {"draft": {"source": {"path": "small.gguf"}}, "backend": "openvino"}
    backend, options = backend_and_options(Variant("Q4_0", SMALL.path, settings), LOAD)
    assert (backend, options.draft, options.own_layers) == ("openvino", Path("small.gguf"), False)
    assert options.profile_limit_s == 27
    assert options.speculate
    _, options = backend_and_options(
        Variant("Q4_0", SMALL.path, {"draft": {"own_layers": True}}), LOAD
    )
    assert (options.draft, options.own_layers) == (None, True)


def test_prompts_are_parts_of_the_text() -> None:
    draw, text = text_prompts(range(100)), range(100)
    prompts = [draw(8) for _ in range(20)]
    assert all(prompt == tuple(text[prompt[0] : prompt[0] + 8]) for prompt in prompts)
    assert len(set(prompts)) > 10


def test_perplexity_and_agreement() -> None:
    original, other = reading(8.0, 1, 2, 3, 4), reading(9.0, 1, 2, 5, 4)
    assert original.perplexity == pytest.approx(8.0)
    assert other.agreement(original) == 0.75


def test_what_is_much_worse_is_not_chosen() -> None:
    found = {GIVEN: reading(8.0, 1), SMALL: reading(8.5, 1)}
    assert eligible(found, 0.1) == [GIVEN, SMALL]
    assert eligible(found, 0.03) == [GIVEN]
    speeds = {
        variant: MeasuredSpeed(100, {4: 10}, {4: times}, 2**20)
        for variant, times in ((GIVEN, (0.5, 2.0, 2.0)), (SMALL, (1.0, 1.0, 3.0)))
    }
    assert fastest(speeds, 4, [GIVEN]) == GIVEN
    assert fastest(speeds, 4, [GIVEN, SMALL]) == SMALL


@pytest.mark.parametrize("first", [[], [7]])
def test_windows_begin_as_the_model_wants(first: list[int]) -> None:
    tokens = list(range(2 * WINDOW))
    windows = quality.split(tokens, first)
    assert [len(window) for window in windows] == [WINDOW] * len(windows)
    assert [window[: len(first)] for window in windows] == [first] * len(windows)
    read = [token for window in windows for token in window[len(first) :]]
    assert read == tokens[: len(read)]


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="has 3 tokens"):
        quality.split([1, 2, 3], [])


def test_the_likelihood_is_of_the_second_halfs_next_tokens() -> None:
    rows = [np.log(np.array([0.5, 0.25, 0.25], dtype=np.float32)) for _ in range(4)]
    assert quality.window_likelihood(rows, [1, 1, 2, 0]) == pytest.approx(math.log(0.5))


def test_a_file_is_made_anew_when_its_source_changes(tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"a")
    first = quality.target(source, "Q4_0", tmp_path)
    assert quality.target(source, "Q8_0", tmp_path) != first
    source.write_bytes(b"ab")
    assert quality.target(source, "Q4_0", tmp_path) != first
    assert first.name.startswith("m-")
    assert first.name.endswith("-Q4_0.gguf")


def test_the_table_compares_rounds(tmp_path: Path) -> None:
    given, small = (Variant(v.format, tmp_path / v.path) for v in (GIVEN, SMALL))
    for variant, n_bytes in ((given, 2 * 2**20), (small, 2**20)):
        variant.path.write_bytes(bytes(n_bytes))
    speeds = {
        given: MeasuredSpeed(100, {1: 10, 4: 30}, {1: (1.0, 1.0), 4: (2.0, 4.0)}, 2**20),
        small: MeasuredSpeed(200, {1: 20, 4: 60}, {1: (1.0, 1.0), 4: (1.0, 1.0)}, 2**20),
    }
    readings = {given: reading(8.0, 1, 2), small: reading(8.5, 1, 3)}
    table = formats_table(speeds, readings, LOAD, users=4).splitlines()
    assert table[2] == "| as given | 2 | 8.00 | 100% | 100 | 10.0 | 30.0 | 1 | 1.00 (1.00-1.00) |"
    assert table[3] == "| Q4_0 | 1 | 8.50 | 50% | 200 | 20.0 | 60.0 | 1 | 0.38 (0.25-0.50) |"


def test_the_advice_is_configuration() -> None:
    said = advice(Variant("Q4_0", SMALL.path, {"kv_unified": True}), is_given=False)
    head, _, lines = said.partition("\n\n")
    assert head.startswith("The Q4_0 file is the fastest")
    found: Any = yaml.safe_load(lines)
    assert found == {
        "models": [
            {"id": "m-Q4_0", "source": {"path": "m-Q4_0.gguf"}, "engine": {"kv_unified": True}}
        ]
    }


def test_the_users_are_measured_too() -> None:
    args = parse_args(["m.gguf", "--users", "6", "--sequences", "16,1"])
    assert args.sequences == (1, 6, 16)
    with pytest.raises(SystemExit):
        parse_args(["m.gguf", "--formats", "Q9_9"])
