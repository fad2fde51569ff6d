"""`python skyrl_own_loop.py`: plays scripts with skyrl_gym alone, as SkyRL's loop does; a line of JSON each way.

Each script: env, config, extras, max_turns, replies. Of each: the rewards of its turns, what was shown after them,
whether it came to its end, and the environment's metrics.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import skyrl_gym


def play(script: dict[str, Any]) -> dict[str, Any]:
    extras = {**script["extras"], "max_turns": script["max_turns"]}
    environment = skyrl_gym.make(script["env"], env_config=SimpleNamespace(**script["config"]), extras=extras)
    environment.init([{"role": "user", "content": "?"}])
    rewards, shown, done = [], [], False
    for reply in script["replies"]:
        output = environment.step(reply)
        rewards.append(float(output["reward"]))
        shown.append([message["content"] for message in output["observations"]])
        if done := bool(output["done"]):
            break
    environment.close()
    return {"rewards": rewards, "shown": shown, "done": done, "metrics": environment.get_metrics()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps([play(script) for script in json.loads(line)]), flush=True)
