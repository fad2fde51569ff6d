"""A run whose retrieval server is killed and started again: it goes on, and nothing of the outage is trained."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tokenizers import Tokenizer

pytest.importorskip("bm25s")

from tests.orchestration.runs import check_finished, query, recorded, start
from tests.retrieval.servers import port_of, serving, write_corpus
from tests.until import wait_until
from tests.worlds import tiny, user
from treadle.core.types import Task
from treadle.envs.base import EnvStep
from treadle.envs.search.environment import Search
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.setup.inputs import load_inputs

TOKENIZER = Tokenizer.from_file(str(tokenizer_directory(tiny().model) / "tokenizer.json"))
HERE = "tests.orchestration.test_search_outage"


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
