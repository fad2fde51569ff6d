"""`treadle models`: what is in the cache, and getting more of it."""

from pathlib import Path

import pytest

from tests.cli.worlds import treadle


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TREADLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "treadle" / "models"


def test_an_empty_cache_lists_the_models_with_a_name_and_is_not_made(cache: Path) -> None:
    for words in (("models",), ("models", "list")):
        done = treadle(*words)
        assert done.status == 0
        assert done.out.split()[:3] == ["smollm2", "not", "here"]
        assert "treadle models get smollm2" in done.out
    assert not cache.exists()


def test_a_gguf_file_is_converted_once_listed_and_evaluated(cache: Path) -> None:
    pytest.importorskip("gguf", reason="needs treadle[gguf]")
    from tests.gguf_files import write_gguf

    write_gguf(Path("tiny.gguf"))
    done = treadle("models", "get", "tiny.gguf")
    assert done.status == 0, done.err
    [directory] = (path for path in cache.iterdir() if path.is_dir())
    assert done.out.splitlines() == [
        "licence: mit",
        f"model directory: {directory}",
        "train from it: treadle train RECIPE model.path=tiny.gguf model.build=null",
    ]
    listed = treadle("models").out.splitlines()
    assert listed[0].startswith("smollm2  ")
    assert listed[1].split() == [str(Path("tiny.gguf").resolve()), "0.1", "MB", "licence", "mit", str(directory)]
    small = ("data.held_out={source: arithmetic, options: {count: 2}}", "rollout.max_completion_tokens=2")
    done = treadle("eval", "arithmetic", "--model", "tiny.gguf", *small)
    assert done.status == 0, done.err
    assert "success" in done.out


def test_a_directory_of_the_cache_that_is_no_model_is_named(cache: Path) -> None:
    (cache / "strange").mkdir(parents=True)
    done = treadle("models")
    assert done.status == 1
    assert f"{cache / 'strange'} is damaged: source.json: " in done.err
    assert "remove the directory" in done.err
