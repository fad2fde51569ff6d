"""Writes the cases: `python -m conformance.generate`.

Ids, log-probabilities and rewards come from one seed per case (its name); what must come out, from `reference.py`.
Log-probabilities are multiples of 1/256 and rewards of 1/8, which float32 holds exactly (except in `equal_rewards`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from conformance import reference

CASES = Path(__file__).resolve().parent / "cases"
SEED = "treadle-conformance-1"

BEGIN, END, IMAGE, USER, REPLY, THINK, THOUGHT, FIRST_WORD = 1, 2, 3, 4, 5, 6, 7, 8
"""Ids with a meaning: opens a prompt; ends a turn; placeholder of a patch of an image; opens the user's and the model's
turn; begin and end of a thought. Ids from FIRST_WORD on are words."""

Ids = list[int]
Step = dict[str, Any]
Attempt = dict[str, Any]


class Maker:
    """Draws of one case."""

    def __init__(self, name: str) -> None:
        self.random = Random(f"{SEED} {name}")

    def words(self, low: int, high: int) -> Ids:
        return [self.random.randrange(FIRST_WORD, reference.VOCABULARY) for _ in range(self.random.randint(low, high))]

    def other(self, word: int) -> int:
        """Return another word."""
        return FIRST_WORD + (word - FIRST_WORD + self.random.randrange(1, 15)) % (reference.VOCABULARY - FIRST_WORD)

    def opening(self) -> Ids:
        return [BEGIN, *self.words(2, 3), USER, *self.words(1, 3), REPLY]

    def observation(self) -> Ids:
        return [USER, *self.words(1, 3), REPLY]

    def reply(self) -> Ids:
        return [*self.words(1, 3), END]

    def thought(self) -> Ids:
        return [THINK, *self.words(1, 2), THOUGHT]

    def step(self, prompt: Ids, completion: Ids | None = None, **fields: Any) -> Step:
        completion = self.reply() if completion is None else completion
        made: Step = {
            "prompt": prompt,
            "completion": completion,
            "logprobs": self._logprobs(prompt, completion),
            "mask": [True] * len(completion),
            "versions": [0] * len(completion),
            "stop": "stop",
            "reward": 0.0,
            "discarded": False,
            "caller": None,
        }
        return made | fields

    def _logprobs(self, prompt: Ids, completion: Ids) -> list[float]:
        """Return what an engine reports whose weights are near `reference.head`."""
        found = []
        engine = reference.head() + 0.05 * np.sin(np.arange(reference.WIDTH) + 1)
        for t, ident in enumerate(completion):
            logp = reference.log_softmax(engine @ reference.features([*prompt, *completion[:t]])[-1])[ident]
            found.append(-max(1, round(-256 * float(logp)) + self.random.randint(-8, 8)) / 256)
        return found

    def talk(self, opening: Ids, turns: int, **fields: Any) -> list[Step]:
        """Return the steps of an agent that only appends."""
        steps = [self.step(opening, **fields)]
        while len(steps) < turns:
            steps.append(self.step([*full(steps[-1]), *self.observation()], **fields))
        return steps

    def goes_on(self, *ids: int) -> Step:
        """Return a step whose prompt is these ids and a new observation."""
        return self.step([*ids, *self.observation()])

    def plain(self, opening: Ids, rewards: list[float | None], low: int = 1, high: int = 3) -> list[Attempt]:
        """Return append-only attempts with these rewards."""
        return [attempt(self.talk(opening, self.random.randint(low, high)), reward) for reward in rewards]


def full(step: Step) -> Ids:
    return [*step["prompt"], *step["completion"]]


def attempt(steps: list[Step], reward: float | None) -> Attempt:
    return {"reward": reward, "steps": steps}


def paid(steps: list[Step], rewards: list[float]) -> list[Step]:
    return [step | {"reward": reward} for step, reward in zip(steps, rewards, strict=True)]


Groups = list[list[Attempt]]
Family = Callable[[Maker, int], Groups]


def among(m: Maker, opening: Ids, steps: list[Step], n: int) -> Groups:
    """Return the steps as one attempt of a group of two or three; every other case has a second group."""
    rewards: list[float | None] = [0.0, 0.5] if n % 3 else [0.25]
    group = [attempt(steps, 1.0), *m.plain(opening, rewards)]
    group = group[n % len(group) :] + group[: n % len(group)]
    return [group, m.plain(m.opening(), [0.5, -0.5])] if n % 2 else [group]


def append_only(m: Maker, n: int) -> Groups:
    """Every prompt is all that came before, and something new."""
    rewards: list[float | None] = [1.0, 0.0, 0.5, 0.25]
    return [m.plain(m.opening(), rewards[: 2 + n % 3], 1 + n // 4, 2 + n // 2) for _ in range(1 + n % 2)]


def drift(m: Maker, n: int) -> Groups:
    """An earlier reply stands in a later prompt as other tokens of the same text."""
    opening = m.opening()
    first = m.step(opening, [*m.words(3, 3), END])
    a, b, c, end = first["completion"]
    shown = [[m.other(a), c, end], [a, m.other(b), end], [a, b, m.other(c), m.other(c), end], [m.other(a), b, c, end]][
        n % 4
    ]
    second = m.goes_on(*opening, *shown)
    steps = [first, second, m.goes_on(*full(second))]
    if n >= 3:  # and again, of the second reply
        steps[2] = m.goes_on(*second["prompt"], m.other(second["completion"][0]), *second["completion"][1:])
    return among(m, opening, steps, n)


def stripped_thoughts(m: Maker, n: int) -> Groups:
    """The template leaves earlier thoughts out of later prompts."""
    opening, shown, steps = m.opening(), [], []
    prompt = opening
    for turn in range(2 + n % 3):
        thought, said = m.thought(), m.reply()
        steps.append(m.step(prompt, [*thought, *said]))
        kept = [*thought, *said] if n >= 4 and turn == 0 else said
        shown += [*kept, *m.observation()]
        prompt = [*opening, *shown]
    return among(m, opening, steps, n)


def sliding_window(m: Maker, n: int) -> Groups:
    """Only the newest turns are sent; older ones drop out."""
    opening, steps = m.opening(), list[Step]()
    turns: list[Ids] = []
    keep = 1 + n % 2
    for _ in range(3 + n // 2):
        steps.append(m.step([*opening, *(i for turn in turns[-keep:] for i in turn)]))
        turns.append([*steps[-1]["completion"], *m.observation()])
    return among(m, opening, steps, n)


def compaction(m: Maker, n: int) -> Groups:
    """The model is asked for a summary and the conversation starts again from it, or the agent shortens it itself."""
    opening = m.opening()
    steps = m.talk(opening, 2)
    for _ in range(1 + n // 4):
        if n % 3 == 2:  # by itself
            steps.append(m.step([*opening, *m.words(2, 2), *m.observation()]))
            continue
        summary = m.goes_on(*full(steps[-1]))
        if n % 2:  # played, not trained
            summary["mask"] = [False] * len(summary["mask"])
        steps += [summary, m.step([*opening[:-1], *summary["completion"], *m.observation()])]
    steps.append(m.goes_on(*full(steps[-1])))
    return among(m, opening, steps, n)


def sub_agents(m: Maker, n: int) -> Groups:
    """A step calls another conversation of the same model; its answer comes back in the main one."""
    opening = m.opening()
    main = m.step(opening)
    steps, called = [main], 0
    for number in range(1 + n % 2):
        begins = [*opening[: 2 + number], *m.words(2, 3), USER, *m.words(1, 2), REPLY]
        steps += m.talk(begins, 1 + (n + number) % 2, caller=called)
        answer = steps[-1]["completion"]
        main = m.step([*full(main), USER, *answer[:-1], REPLY])
        steps.append(main)
        called = len(steps) - 1
    return among(m, opening, steps, n)


def forks(m: Maker, n: int) -> Groups:
    """A later prompt leaves the conversation at some depth, and the earlier one goes on."""
    opening = m.opening()
    steps = m.talk(opening, 2 + n // 4)
    depth = [1, 3, len(opening), len(full(steps[0])), len(full(steps[0])) + 1, len(steps[1]["prompt"]), 2, 0][n]
    last = len(steps) - 1
    prompt = [*full(steps[-1])[:depth], *m.words(1, 2), REPLY] if depth else [THINK, *m.words(2, 3), REPLY]
    said = None
    if n == 5:  # the very prompt again; the reply begins with the same tokens
        prompt, said = steps[1]["prompt"], [*steps[1]["completion"][:-1], *m.reply()]
    backtracks = depth == len(opening)  # the same conversation, its first reply left behind
    steps.append(m.step(prompt, said, caller=None if backtracks else last))
    steps.append(m.goes_on(*full(steps[last])))
    if n % 2:
        steps.append(
            m.step([*opening[: 1 + n % 3], m.other(opening[1 + n % 3]), *m.words(1, 2), REPLY], caller=last + 2)
        )
        steps.append(m.goes_on(*full(steps[last + 2])))
    return among(m, opening, steps, n)


def cut_replies(m: Maker, n: int) -> Groups:
    """A reply reached the limit of its length: it has no end token, and the template closes its turn."""
    opening = m.opening()
    first = m.step(opening, m.words(3, 4), stop="length")
    steps = [first]
    if n % 2:
        steps.append(m.goes_on(*full(first), END))
    steps.append(m.step([*full(steps[-1]), *([] if n % 2 else [END]), *m.observation()], m.words(2, 3), stop="length"))
    return among(m, opening, steps, n)


def end_tokens(m: Maker, n: int) -> Groups:
    """A reply ended at a stop string; the end token after it is the template's, and was not sampled."""
    opening = m.opening()
    steps = [m.step(opening, m.words(1, 3))]
    for turn in range(1 + n // 2):
        ends = [END] if steps[-1]["completion"][-1] != END else []
        said = m.reply() if (n + turn) % 2 else m.words(1, 3)
        steps.append(m.step([*full(steps[-1]), *ends, *m.observation()], said))
    return among(m, opening, steps, n)


def stop_strings(m: Maker, n: int) -> Groups:
    """The last sampled token runs over the stop string: it is recorded and masked; later prompts have it, or not."""
    opening = m.opening()
    said = m.words(3, 4)
    tail = 1 + n % 2
    mask = [True] * (len(said) - tail) + [False] * tail
    first = m.step(opening, said, mask=mask)
    shown = said if n < 2 else said[:-tail]
    second = m.goes_on(*opening, *shown, END)
    return among(m, opening, [first, second, m.goes_on(*full(second))], n)


def empty_completions(m: Maker, n: int) -> Groups:
    """A call returned no token: there is nothing to train, and the attempt counts all the same."""
    opening = m.opening()
    first = m.step(opening, [] if n in (0, 3) else None)
    steps = [first, m.goes_on(*full(first), *([END] if n in (0, 3) else []))]
    if n in (1, 2):
        steps.append(m.step([*full(steps[-1]), *m.observation()], []))
    if n == 2:
        steps.append(m.goes_on(*full(steps[-1]), END))
    groups = among(m, opening, steps[:1] if n == 3 else steps, n)
    return groups


def retries(m: Maker, n: int) -> Groups:
    """An answer was thrown away and asked for again; the episode goes on from the second one."""
    opening = m.opening()
    thrown = m.step(opening, discarded=True, reward=[0.0, -0.25, 0.0, 0.5, 0.0][n])
    if n == 2:  # cancelled before the first token
        thrown = m.step(opening, [], discarded=True, stop="abort")
    again = m.step(opening, thrown["completion"] if n == 4 else None)
    steps = [thrown, again, m.goes_on(*full(again))]
    if n % 2:
        steps = [again, m.step([*full(again), *m.observation()], discarded=True)]
        steps.append(m.step(steps[1]["prompt"]))
        if n == 3:
            steps = [thrown, *steps]
    return among(m, opening, steps, n)


def versions(m: Maker, n: int) -> Groups:
    """The weights changed between calls, or within one: each token keeps what its own version reported."""
    groups = append_only(m, n)
    for number, one in enumerate(one for group in groups for one in group):
        version = number % 2
        for step in one["steps"]:
            middle = m.random.randrange(len(step["completion"]) + 1)
            step["versions"] = [version + (t >= middle) for t in range(len(step["completion"]))]
            version = step["versions"][-1]
    return groups


def failed_siblings(m: Maker, n: int) -> Groups:
    """An attempt failed and has no reward: it is trained nowhere, and its siblings are compared without it."""
    rewards: list[list[float | None]] = [
        [1.0, None, 0.0],
        [None, 1.0, 0.25],
        [None, 0.5, None, 1.0],
        [1.0, 0.0, None],
        [None, 1.0, None, 0.0],
    ]
    groups = [m.plain(m.opening(), rewards[n])]
    return [*groups, m.plain(m.opening(), [None, 1.0] if n == 3 else [0.0, None, 1.0])] if n % 2 else groups


def unequal_groups(m: Maker, n: int) -> Groups:
    """Groups have different numbers of attempts."""
    sizes = [(2, 3), (4, 2), (1, 3), (2, 3, 4), (3, 1, 2)][n]
    rewards: list[float | None] = [1.0, 0.0, 0.25, 0.75]
    return [m.plain(m.opening(), rewards[:size]) for size in sizes]


def step_rewards(m: Maker, n: int) -> Groups:
    """Single steps have rewards of their own."""
    opening = m.opening()
    a, b, c = m.talk(opening, 3), m.talk(opening, 2), m.talk(opening, [3, 1, 2, 4, 1, 2, 3, 3][n])
    group = [
        attempt(paid(a, [0.5, 0.0, 0.25]), 0.75),
        attempt(paid(b, [0.0, 1.0]), 1.0 if n % 2 else 1.5),  # the rest belongs to the last step
        attempt(paid(c, [0.125] * len(c)), 0.125 * len(c)),
    ]
    if n == 5:
        group.append(attempt(paid(m.talk(opening, 3), [1.0, 1.0, 1.0]), None))
    if n == 6:  # a sub-agent that earns
        called = m.step([*opening[:2], *m.words(2, 2), REPLY], caller=0, reward=0.5)
        group[1] = attempt([b[0], called, b[1] | {"reward": 0.25}], 0.75)
    if n == 7:  # a step that earns and is not trained
        group[0]["steps"][1] |= {"reward": 0.5, "mask": [False] * len(a[1]["completion"])}
        group[0]["reward"] = 1.25
    return [group, m.plain(m.opening(), [1.0, 0.0])] if n % 3 == 1 else [group]


def masked_steps(m: Maker, n: int) -> Groups:
    """Some sampled tokens are not to be trained: whole steps, parts of them, or all of an attempt."""
    groups = append_only(m, n + 2)
    steps = groups[0][0]["steps"]
    chosen = [steps[:1], steps[-1:], [], steps, steps[:1]][n]
    for step in chosen:
        step["mask"] = [False] * len(step["mask"])
    for step in steps if n in (2, 4) else []:
        step["mask"] = [kept and t % 2 == 0 for t, kept in enumerate(step["mask"])]
    return groups


def images(m: Maker, n: int) -> Groups:
    """Placeholders of images stand in prompts as runs of one id; they are read, never trained."""
    opening = [BEGIN, *m.words(1, 2), USER, *[IMAGE] * (3 + n), *m.words(1, 2), REPLY]
    first = m.step(opening)
    second = m.step([*full(first), USER, *[IMAGE] * 4, *m.words(1, 2), REPLY])
    steps = [first, second, m.goes_on(*full(second))]
    if n == 2:  # an older image is taken out
        steps[2] = m.goes_on(*full(first), USER, *second["prompt"][len(full(first)) + 5 :], *second["completion"])
    return among(m, opening, steps, n)


def equal_rewards(m: Maker, n: int) -> Groups:
    """A group with equal rewards teaches nothing: its advantages are exactly 0, whatever a mean rounds to."""
    equal: list[float | None] = [0.7] * (3, 5, 8)[n]
    return [m.plain(m.opening(), equal), *([m.plain(m.opening(), [1.0, 0.0])] if n else [])]


def mixed(m: Maker, n: int) -> Groups:
    """Several of these at once, in one update."""
    kinds: list[list[Family]] = [
        [drift, retries, failed_siblings],
        [sub_agents, stripped_thoughts, masked_steps],
        [compaction, end_tokens, unequal_groups],
        [forks, cut_replies, step_rewards],
    ]
    return [group for family in kinds[n] for group in family(m, n)]


FAMILIES: dict[Family, int] = {
    append_only: 8,
    drift: 6,
    stripped_thoughts: 6,
    sliding_window: 5,
    compaction: 6,
    sub_agents: 6,
    forks: 8,
    cut_replies: 4,
    end_tokens: 5,
    stop_strings: 4,
    empty_completions: 4,
    retries: 5,
    versions: 4,
    failed_siblings: 5,
    unequal_groups: 5,
    step_rewards: 8,
    masked_steps: 5,
    images: 3,
    equal_rewards: 3,
    mixed: 4,
}


def cases() -> dict[str, dict[str, Any]]:
    """Return all cases by name."""
    made = {}
    for family, count in FAMILIES.items():
        for n in range(count):
            name = f"{family.__name__}-{n + 1:02}"
            case: dict[str, Any] = {
                "format": 1,
                "name": name,
                "family": family.__name__,
                "about": (family.__doc__ or "").strip(),
                "gamma": 1.0 if n % 2 else 0.875,
                "length_norm": 8.0,
                "groups": family(Maker(name), n),
            }
            made[name] = case | {"expected": _rounded(reference.expected(case))}
    return made


def _rounded(value: Any) -> Any:
    """Round floats to twelve digits: the same on every processor."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def text_of(case: dict[str, Any]) -> str:
    """Return the file of a case: JSON, each list of numbers on one line."""
    indented = json.dumps(case, indent=1)
    flat = re.compile(r"\[[^\[\]{}]*\]")
    text = flat.sub(lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), indented)
    return text + "\n"


def main() -> None:
    CASES.mkdir(exist_ok=True)
    for old in CASES.glob("*.json"):
        old.unlink()
    for name, case in cases().items():
        (CASES / f"{name}.json").write_text(text_of(case))
    print(f"{len(cases())} cases in {CASES}")


if __name__ == "__main__":
    main()
