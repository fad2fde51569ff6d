"""`python scoring_child.py BYTES PATH`: scores answers for `environment`, one at a time, confined to just that.

PATH: import path of this process, a JSON array. Standard input: requests, a line of JSON each. Standard output: `{}`
once it is ready, then an answer to each.

    {"dataset": "chain_sum", "config": {}}
        -> {}                        once it is made, which may take a second and is not part of a score's time
    {"dataset": "chain_sum", "config": {}, "answer": "7", "entry": BASE64, "seconds": 10}
        -> {"score": 1.0}
    {"error": "ValueError: ..."}     instead of either: the library's error

It is no boundary against malicious code: an expression evaluated by a scorer could read files and use the network. It
ends evaluations that take too much time or memory, lets no file grow and starts no process.
"""

import base64
import json
import os
import pickle
import sys
from functools import cache
from typing import Any, TextIO

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each of its threads takes address space

from reasoning_gym.dataset import ProceduralDataset

from treadle.envs.sql.child import confine, limit_cpu
from treadle.integrations.reasoning_gym.datasets import make_dataset


def main(address_space: int) -> None:
    """Confine this process and answer requests until standard input ends. address_space: limit in bytes."""
    answers = os.fdopen(os.dup(1), "w")
    # Redirects output printed by scorers.
    os.dup2(2, 1)
    confine(address_space)
    _send(answers, {})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            scorer = _scorer(request["dataset"], json.dumps(request["config"]))
            if "entry" in request:
                limit_cpu(request["seconds"])
                entry = pickle.loads(base64.b64decode(request["entry"]))
                answer = {"score": float(scorer.score_answer(request["answer"], entry))}
        except BaseException as error:  # noqa: BLE001  # an answer may cause any error
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        _send(answers, answer)


@cache
def _scorer(name: str, config: str) -> ProceduralDataset:
    return make_dataset(name, json.loads(config), count=1, seed=0)


def _send(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
