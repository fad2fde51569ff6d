"""Models beside the policy, over real HTTP: called by name, recorded with the attempt, and in no step."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

pytest.importorskip("httpx")

from tests.judge.servers import TOKENS, judging
from tests.judge.servers import quick as quick
from tests.rollout.kit import attempt
from tests.worlds import ROOT, addresses, plain_ids, saying, tiny, tool, user
from treadle.core.config import build
from treadle.core.errors import Cause, ConfigError, FormError
from treadle.core.types import Form, Message, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.plan.other_models import make_models
from treadle.rollout.agents.clients import anthropic_client
from treadle.rollout.other_models import OtherModelConfig, address_of
from treadle.rollout.session import CallOptions

HI, TELL = user("hi"), user("Tell it.")


class Shop(Environment):
    """A simulated user asks, and answers each reply; it ends by `bye`."""

    name = "user"

    async def reset(self, task: Task) -> list[Message]:
        return [user(await self.models[self.name].chat([TELL]))]

    async def step(self, text: str) -> EnvStep:
        said = await self.models["user"].chat([TELL, user(text)], temperature=0.5)
        return EnvStep(reward=1.0, done=True) if said == "bye" else EnvStep([user(said)])


class Careless(Shop):
    """Takes whatever goes wrong for a reply of the policy that earns nothing."""

    async def step(self, text: str) -> EnvStep:
        try:
            return await super().step(text)
        except Exception:  # noqa: BLE001
            return EnvStep(reward=0.0, done=True)


class Misnamed(Shop):
    name = "usr"


async def played(player: Any, models: Mapping[str, dict[str, Any]], **extras: Any) -> Trajectory:
    made = make_models({name: build(OtherModelConfig, {"model": "m", **config}) for name, config in models.items()})
    return await attempt(player, saying("well"), [HI], extras, made, max_completion_tokens=256)


async def test_an_environment_calls_a_model_by_name() -> None:
    says = iter(["hello", "blue?", "bye"])
    with judging(lambda m: next(says)) as server:
        trajectory = await played(Shop, {"user": {"url": server.url, "options": {"max_tokens": 9}}})
    assert (trajectory.reward, trajectory.failure) == (1.0, None)
    assert [[call.reply["content"] for call in step.calls] for step in trajectory.steps] == [
        ["hello", "blue?"],
        ["bye"],
    ]
    call = trajectory.steps[1].calls[0]
    assert (call.model, call.messages) == ("user", (TELL, user("well")))
    assert call.prompt_tokens + call.completion_tokens == TOKENS and call.seconds > 0
    assert {name: trajectory.metrics[name] for name in ("model_user_calls", "model_user_tokens")} == {
        "model_user_calls": 3,
        "model_user_tokens": 3 * TOKENS,
    }
    sent = [{key: body[key] for key in body.keys() - {"messages"}} for body in server.requests]
    assert sent[0] == {"model": "m", "max_tokens": 9} and sent[1]["temperature"] == 0.5
    trained = [step.full_ids[step.mask.nonzero()[0] + len(step.prompt_ids)].tolist() for step in trajectory.steps]
    assert all(ids[: len(plain_ids("well"))] == plain_ids("well") for ids in trained)


async def test_the_example_of_the_page_plays() -> None:
    text = (ROOT / "docs" / "other-models.md").read_text()
    [recipe], [example, _] = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("yaml", "python"))
    found: dict[str, Any] = {}
    exec(example, found)
    tiny(*(f"models.{name}={json.dumps(model)}" for name, model in yaml.safe_load(recipe)["models"].items()))
    says = iter(["A hat?", "bye"])
    with judging(lambda m: next(says)) as server:
        trajectory = await played(found["Shop"], {"user": {"url": server.url}}, wish="You want a hat.")
    assert (trajectory.reward, len(trajectory.steps)) == (1.0, 1)
    assert [message["role"] for message in server.requests[1]["messages"]] == ["system", "user", "assistant", "user"]


async def test_a_form_is_passed_on_to_a_server_or_refused() -> None:
    made = make_models({"user": build(OtherModelConfig, {"url": "http://a/v1", "model": "m"})})["user"]()
    with pytest.raises(FormError, match=r"^the choice: a model behind a URL is asked for a JSON schema only"):
        await made.chat("s", addresses()[0])([HI], (), CallOptions(form=Form.choice(["a"])))
    with judging(lambda m: "{}") as server:
        made = make_models({"user": build(OtherModelConfig, {"url": server.url, "model": "m"})})["user"]()
        await made.chat("s", addresses()[0])([HI], (), CallOptions(form=Form.json({"type": "object"})))
    assert server.requests[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize("player", [Shop, Careless])
async def test_a_model_that_fails_is_never_a_reward(player: type[Environment]) -> None:
    with judging(lambda m: "hello" if len(m) == 1 else 400) as server:
        trajectory = await played(player, {"user": {"url": server.url}})
    assert trajectory.reward is None and trajectory.failure is not None
    assert trajectory.failure.cause is Cause.ENGINE
    assert trajectory.failure.message == "the model 'user': status 400: {}"
    assert trajectory.metrics["model_user_calls"] == 1  # that was answered, and is paid for


async def test_another_name_is_an_error_that_names_those_there_are() -> None:
    with judging(lambda m: "hello") as server:
        url = {"url": server.url}
        trajectory = await played(Misnamed, {"user": url, "critic": url})
        unnamed = await played(Misnamed, {})
    assert trajectory.failure is not None and unnamed.failure is not None
    assert "no model 'usr' beside the policy; models names user, critic; a teacher and" in trajectory.failure.message
    assert "no model 'usr' beside the policy; the recipe names none (models); a teacher" in unnamed.failure.message


async def test_an_agent_program_calls_a_model_by_name() -> None:
    async def solve(task: Task, client: Any) -> float:
        chat = client.chat.completions
        first = await chat.create(model="policy", messages=[HI])
        said = await chat.create(model="user", messages=[TELL], max_tokens=7)
        assert (said.model, said.choices[0].message.content, said.usage.total_tokens) == ("user", "hello", TOKENS)
        stream = await chat.create(model="user", messages=[TELL], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
        answer = await client.responses.create(model="user", input="Tell it.")
        assert answer.output_text == "hello"
        assert [model.id async for model in client.models.list()] == ["policy", "user"]
        await chat.create(model="policy", messages=[HI, first.choices[0].message.model_dump(), tool("more")])
        return 1.0

    with judging(lambda m: "hello") as server:
        trajectory = await played(solve, {"user": {"url": server.url}})
    assert (trajectory.reward, trajectory.failure, trajectory.warning) == (1.0, None, "")
    assert [len(step.calls) for step in trajectory.steps] == [3, 0]
    assert [step.dropped for step in trajectory.steps] == [None, None]
    assert server.requests[0]["max_tokens"] == 7


@pytest.mark.xdist_group("anthropic")
async def test_it_speaks_the_other_apis_too() -> None:
    async def solve(task: Task, client: Any) -> float:
        await client.chat.completions.create(model="policy", messages=[HI])
        async with anthropic_client(client) as claude:
            answer = await claude.messages.create(model="user", max_tokens=9, messages=[TELL])
        return float(answer.content[0].text == "hello")

    with judging(lambda m: "hello") as server:
        trajectory = await played(solve, {"user": {"url": server.url}})
    assert (trajectory.reward, trajectory.metrics["model_user_calls"]) == (1.0, 1)


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        ({"model": "usr"}, "there is no 'usr' here; ask for one of policy, user"),
        ({"model": "user", "logprobs": True}, "ids and log-probabilities of tokens are not available from 'user'"),
    ],
)
async def test_what_an_agent_cannot_ask_for(request_of: dict[str, Any], message: str) -> None:
    async def solve(task: Task, client: Any) -> float:
        await client.chat.completions.create(model="policy", messages=[HI])
        await client.chat.completions.create(messages=[HI], **request_of)
        return 1.0

    with judging(lambda m: "hello") as server:
        trajectory = await played(solve, {"user": {"url": server.url}})
    assert trajectory.failure is not None and message in trajectory.failure.message


async def test_a_model_that_fails_an_agent_is_never_a_reward() -> None:
    async def solve(task: Task, client: Any) -> float:
        await client.chat.completions.create(model="policy", messages=[HI])
        try:
            await client.with_options(max_retries=0).chat.completions.create(model="user", messages=[HI])
        except Exception:  # noqa: BLE001
            return 0.0
        return 1.0

    with judging(lambda m: 400) as server:
        trajectory = await played(solve, {"user": {"url": server.url}})
    assert trajectory.reward is None and trajectory.failure is not None
    assert trajectory.failure.cause is Cause.ENGINE and "'user'" in trajectory.failure.message


def test_draws_of_models_and_of_the_policy_have_addresses_of_their_own() -> None:
    [address] = addresses()
    all_of_them = {address, *(address_of(address, name) for name in ("user", "critic"))}
    assert len({(a.seed, a.stream) for a in all_of_them}) == 3
    assert address_of(address, "user") == address_of(address, "user")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "exactly one of url, path and policy"),
        ({"url": "localhost", "model": "m"}, "'localhost' is not an address"),
        ({"url": "http://a/v1"}, "needs model"),
        ({"path": "a", "model": "m"}, "leave them out"),
        ({"path": "a", "options": {"seed": 1}}, "'seed' is none of .*max_tokens"),
        ({"path": "a", "options": {"temperature": -1.0}}, "temperature must be finite"),
    ],
)
def test_what_cannot_work_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(OtherModelConfig, config)
