"""The published recipes of Search-R1, and a run whose retrieval server is killed and started again."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

pytest.importorskip("httpx")
pytest.importorskip("bm25s")

from tests.orchestration.runs import check_finished, query, recorded, start
from tests.retrieval.corpora import write_corpus
from tests.retrieval.servers import port_of, serving
from tests.until import wait_until
from tests.worlds import Quiet, tiny, user
from treadle.core.types import Status, Task
from treadle.envs.base import EnvStep
from treadle.envs.search.environment import Search
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.config import RunConfig, load_recipe
from treadle.orchestration.setup.inputs import load_inputs
from treadle.orchestration.setup.validation import check_settings
from treadle.orchestration.train import train_run

SYNC, ASYNC = "search-r1", "search-r1-async"
PROMPT = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "Question: who wrote Faust?"}]


def published(path: Path, truth: str, prompt: list[dict[str, str]]) -> Path:
    """A file as SkyRL (`reward_spec`) or Search-R1 (`reward_model`) writes it."""
    rows: list[dict[str, Any]] = [
        {
            "data_source": "searchR1_nq",
            "prompt": prompt,
            "ability": "fact-reasoning",
            "env_class": "search",
            truth: {"ground_truth": {"target": ["Goethe", "J. W. von Goethe"]}, "style": "rule"},
            "extra_info": {"index": number, "split": path.stem, "tools_kwargs": {"search": {"question": "?"}}},
            "metadata": None,
        }
        for number in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def recipe(name: str, folder: Path, *overrides: str) -> RunConfig:
    sources = [f"data.train.source={folder}/train.parquet", f"data.held_out.source={folder}/validation.parquet"]
    return load_recipe(name, [*sources, *overrides])


@pytest.mark.parametrize("name", [SYNC, ASYNC])
@pytest.mark.parametrize(
    ("truth", "prompt", "overrides"),
    [
        ("reward_spec", PROMPT, ()),
        ("reward_model", PROMPT[1:], ("data.columns.ground_truth=reward_model.ground_truth.target",)),
        ("reward_model", PROMPT[1:], ("data.columns.ground_truth=reward_model.ground_truth",)),
    ],
)
def test_the_published_files_are_read_as_they_are(
    tmp_path: Path, name: str, truth: str, prompt: list[dict[str, str]], overrides: tuple[str, ...]
) -> None:
    for split in ("train", "validation"):
        published(tmp_path / f"{split}.parquet", truth, prompt)
    config = recipe(name, tmp_path, *overrides)
    check_settings(config)
    inputs = load_inputs(config)
    assert (len(inputs.train), len(inputs.held_out)) == (3, 3)
    task = inputs.train[0]
    assert [dict(message) for message in task.prompt] == prompt
    assert (task.environment, task.extras) == ("search", {"data_source": "searchR1_nq"})

    async def reward() -> Any:
        environment = inputs.players.environments["search"]()
        assert isinstance(environment, Search)
        await environment.reset(task)
        assert (await environment.step("<answer>the j w von Goethe</answer>")).done
        return (await environment.finish(Status.DONE)).reward

    assert asyncio.run(reward()) == 1.0


def test_search_small_trains_with_one_and_two_hops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    small = [
        "warm_start.steps=2",
        "warm_start.max_loss=99",
        "warm_start.batch_size=4",
        "training.tasks_per_update=2",
        "training.group_size=2",
    ]
    small += ["orchestration.updates=1", "data.held_out.options.count=4", "evaluation.greedy_too=false"]
    config = load_recipe("search-small", [*small, "training.threads=1"])
    train_run(config, load_inputs(config), tmp_path / "run", Quiet())
    check_finished(tmp_path / "run")
    assert query(tmp_path / "run", "SELECT count(*) AS n FROM trajectories WHERE status = 'failed'") == [{"n": 0}]


TOKENIZER = Tokenizer.from_file(str(tokenizer_directory(tiny().model) / "tokenizer.json"))
HERE = "tests.orchestration.test_search_recipes"


class Asking(Search):
    """Searches in each reply but the last, whatever the model wrote; pays for even numbers of characters."""

    searches = 0

    async def step(self, text: str) -> EnvStep:
        Asking.searches += 1
        answer = await super().step("<search>golf</search>")
        return answer._replace(reward=float(len(text) % 2))


def tasks(split: str, count: int) -> list[Task]:
    return [Task(f"{split}-{number}", (user("?"),), ground_truth="Bob") for number in range(count)]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    yield write_corpus(tmp_path / "corpus.jsonl", ["Anna likes chess", "Bob likes golf"])


@pytest.mark.slow
def test_the_run_goes_on_and_no_outage_is_trained(tmp_path: Path, corpus: Path) -> None:
    run, over = tmp_path / "run", threading.Event()
    with ExitStack() as servers:
        server, url = servers.enter_context(serving(corpus))
        overrides = (
            f"environment={HERE}:Asking",
            f"environment_options={{url: '{url}', max_turns: 2, patience: 0.3}}",
            f"data.train={{source: '{HERE}:tasks', options: {{count: 6}}}}",
            "data.held_out=null",
            "rollout.max_input_tokens=200",
            "model.build.max_position_embeddings=256",
            "orchestration.updates=6",
            "failures.causes.environment={retries: 40, backoff: 0.01}",
            "failures.max_failed_fraction=1",
        )

        def restart() -> None:
            wait_until(lambda: Asking.searches >= 12 or over.is_set())
            server.kill()
            server.wait()
            failed = Asking.searches
            wait_until(lambda: Asking.searches >= failed + 8 or over.is_set())
            servers.enter_context(serving(corpus, port_of(url)))

        thread = threading.Thread(target=restart)
        thread.start()
        try:
            inputs = load_inputs(tiny(*overrides))
            start(run, *overrides, inputs=inputs)
        finally:
            over.set()
            thread.join()
    failures = query(run, "SELECT DISTINCT failure_cause FROM trajectories WHERE status = 'failed'")
    assert failures == [{"failure_cause": "environment"}]
    check_finished(run)
    for _, steps in recorded(run):
        for step in steps[1:]:
            prompt = TOKENIZER.decode(step.prompt_ids.tolist(), skip_special_tokens=False)
            assert prompt.endswith(
                '<|im_start|>user\n\n<information>{"result": "Doc 1: Bob likes golf\\n"}</information>\n<|im_end|>\n'
                "<|im_start|>assistant\n"
            )
