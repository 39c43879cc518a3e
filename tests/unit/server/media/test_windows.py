"""Windows of long files: cut where nobody speaks, complete, and none of silence."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest

from serve_app.base.errors import InvalidRequestError
from serve_app.base.values.media import SAMPLE_RATE
from serve_app.server.media.windows import LEAST_S, MOST_S, Window, WindowGroup, group
from tests.unit.server.media.test_sounds import MP3_FRAME, wav

pytest.importorskip("miniaudio")


def speech(*stretches: tuple[float, float]) -> bytes:
    """A file of stretches with these seconds and loudnesses."""
    rng = np.random.default_rng(1)
    noise = [rng.normal(0, loudness, int(seconds * SAMPLE_RATE)) for seconds, loudness in stretches]
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((32767 * np.concatenate(noise)).astype("<i2").tobytes())
    return made.getvalue()


def all_of(data: bytes, n: int) -> tuple[list[Window], list[WindowGroup]]:
    groups = [group(data, 0, n)]
    while (start := groups[-1].next_start) is not None:
        groups.append(group(data, start, n))
    return [window for one in groups for window in one.windows], groups


def test_a_short_file_is_one_window() -> None:
    (window,), (found,) = all_of(speech((3.0, 0.1)), 4)
    assert (window.start_s, window.end_s, found.seconds) == (0.0, 3.0, 3.0)
    assert window.sound.size == (3 * SAMPLE_RATE,)


def test_windows_end_in_the_pauses() -> None:
    data = speech((24.0, 0.1), (1.0, 0.003), (21.0, 0.1), (1.0, 0.003), (13.0, 0.1))
    for n in (1, 2, 4):
        windows, groups = all_of(data, n)
        assert len(windows) == 3
        assert len(groups) == -(-3 // n)
        assert 24.1 < windows[0].end_s < 24.9
        assert 46.1 < windows[1].end_s < 46.9
        assert windows[2].end_s == 60.0


@pytest.mark.parametrize("n", [1, 3])
def test_no_sample_is_lost_or_heard_twice(n: int) -> None:
    data = speech((95.3, 0.1))
    windows, _ = all_of(data, n)
    assert [one.start_s for one in windows[1:]] == [one.end_s for one in windows[:-1]]
    assert all(LEAST_S <= one.end_s - one.start_s <= MOST_S for one in windows[:-1])
    heard = np.frombuffer(b"".join(one.sound.samples for one in windows), np.float32)
    samples = np.frombuffer(data[44:], "<i2").astype(np.float32) / 32768
    assert np.allclose(heard, samples, atol=1e-4)


def test_windows_of_silence_are_left_out() -> None:
    windows, groups = all_of(speech((31.0, 0.1), (100.0, 0.0), (5.0, 0.1)), 2)
    assert windows[0].start_s == 0.0
    assert windows[-1].end_s == 136.0
    assert sum(one.end_s - one.start_s for one in windows) < 100
    assert any(not one.windows for one in groups)
    assert all_of(speech((5.0, 0.0)), 4)[0] == []


def test_an_mp3_has_windows_too() -> None:
    windows, (found,) = all_of(MP3_FRAME * 100, 4)
    assert windows == []  # its frames are silent
    assert found.seconds == pytest.approx(100 * 1152 / 44_100, rel=0.1)


FLAC_HEAD = b"fLaC" + bytes(100)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"hello, this is nothing at all", "none of WAV, MP3, FLAC"),
        (wav(20)[:-1000], "cut off"),
        (wav(20)[:30], "cannot be read"),
        (FLAC_HEAD, "cannot be read"),
        (wav(0.05), "allowed"),
        (MP3_FRAME * (10 * 3600 * 44_100 // 1152), "36000.0 seconds"),
        (b"", "none of"),
    ],
    ids=["text", "cut off", "no data", "broken", "short", "ten hours", "empty"],
)
def test_bad_files_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"The file cannot be heard: .*{why}") as error:
        group(data, 0, 4)
    assert error.value.param == "file"
