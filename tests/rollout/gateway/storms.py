"""Many sessions at once, whose clients hang up and try again at random."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx

from tests.rollout.gateway.servers import Served
from tests.worlds import user
from treadle.rendering.replies import plain
from treadle.rollout.gateway.gateway import SessionAddress


async def stubborn(
    http: httpx.AsyncClient, address: SessionAddress, body: dict[str, Any], key: str, dice: random.Random
) -> list[int]:
    """Ask with random patience, again and again as an SDK does, until there is an answer: its ids."""
    for attempt in range(1000):
        patience = None if attempt > 4 else dice.choice([None, dice.uniform(0, 0.6)])
        headers = {"x-stainless-retry-count": str(attempt), **({"idempotency-key": key} if key else {})}
        try:
            async with asyncio.timeout(patience):
                answer = await http.post(f"{address.base_url}/chat/completions", json=body, headers=headers)
        except TimeoutError:
            await asyncio.sleep(dice.choice([0, 0.3]))  # sometimes for longer than the grace
            continue
        assert answer.status_code == 200, answer.text
        if body["stream"]:
            return streamed_ids(answer.text)
        return list(answer.json()["choices"][0]["token_ids"])
    raise AssertionError("no answer")


def streamed_ids(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [i for event in events for choice in event["choices"] for i in choice.get("token_ids", [])]


async def storm(server: Served, sessions: int, seconds: float, seed: int) -> Counter[str]:
    """Sessions of random turns with random disconnects; every step is where it belongs, once. Counts what happened."""
    found: Counter[str] = Counter()
    end = asyncio.get_running_loop().time() + seconds
    limits = httpx.Limits(max_connections=None)

    async def agent(number: int, http: httpx.AsyncClient) -> None:
        dice = random.Random(seed * 1000 + number)
        name = f"session <{number}>"
        address = server.open(name, plain, max_tokens=40)
        received: list[list[int]] = []
        turn = 0
        while asyncio.get_running_loop().time() < end:
            told: Any = {"messages": [user(f"{name} turn {turn}")], "return_token_ids": True}
            body = {"model": "m", "stream": dice.random() < 0.3, **told}
            # identical ones at once: only a key tells whose retry is whose
            keys = dice.choice([[""], [""], [f"{turn} {i}" for i in range(3)]])
            received += await asyncio.gather(*(stubborn(http, address, body, key, dice) for key in keys))
            turn += 1
        await server.gateway.detach(address.secret)
        server.sessions[name].close()
        steps = server.steps(name)
        live = [step for step in steps if step.dropped is None]
        assert sorted(step.completion_ids.tolist() for step in live) == sorted(received)
        for step in steps:
            assert name in server.renderer.decode(step.prompt_ids)
        found.update(answers=len(received), live=len(live), dropped=len(steps) - len(live))

    async with httpx.AsyncClient(limits=limits, timeout=None) as http:
        await asyncio.gather(*(agent(number, http) for number in range(sessions)))
    return found
