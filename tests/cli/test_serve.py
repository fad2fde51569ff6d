"""`treadle serve`: a process that clients talk to, until Ctrl-C; unmodified ones: tests/rollout/gateway."""

import re
import signal
from pathlib import Path

import httpx

from tests.cli.conftest import Trained
from tests.cli.worlds import start_treadle
from treadle.core.files import WrittenFile
from treadle.models.loading import file_sha256
from treadle.orchestration.store.rollout_store import read_shard


def test_it_serves_records_and_ends_cleanly(finished: Trained, tmp_path: Path) -> None:
    model = sorted((finished.path / "checkpoints").iterdir())[-1]
    with start_treadle("serve", model, "--port", "0", "--record", tmp_path) as server:
        try:
            assert server.stdout is not None
            told = "".join(server.stdout.readline() for _ in range(4))
            url, key = re.findall(r"base URL +(\S+)|API key +(\S+)", told)[0][0], told.split()[-1]
            assert url.startswith("http://127.0.0.1:")
            assert "replies   read by auto\n" in told
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=300) as client:
                assert [m["id"] for m in client.get("models").json()["data"]] == [model.name]
                message = {"role": "user", "content": "say 1"}
                asked = {"model": "any", "messages": [message], "max_tokens": 3, "temperature": 0.5}
                answer = client.post("chat/completions", json={**asked, "return_token_ids": True}).json()
                for wrong, said in (
                    ({"prompt": "say", "frequency_penalty": 1}, "frequency_penalty"),
                    ({"prompt": "say " * 128}, "tokens, the model's context is 128; shorten the prompt"),
                ):
                    refused = client.post("completions", json={"model": "any", **wrong})
                    assert (refused.status_code, said in refused.text) == (400, True)
        except BaseException:
            server.kill()  # or leaving the context would wait for it
            raise
        server.send_signal(signal.SIGINT)
        rest, errors = server.communicate()
    assert (server.returncode, errors) == (0, "")
    assert re.search(r"^steps: 1, in .*serve-000000.parquet$", rest.strip())
    name = "serve-000000.parquet"
    [steps] = read_shard(tmp_path, WrittenFile(name, file_sha256(tmp_path / name))).values()
    assert [step.completion_ids.tolist() for step in steps] == [answer["choices"][0]["token_ids"]]
    assert (steps[0].sampling.temperature, steps[0].sampling.max_tokens) == (0.5, 3)
