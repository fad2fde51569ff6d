"""Scripted replies to GSM8K's questions, with the rewards and observations that skyrl-gym 0.4.0 gives for them."""

from typing import NamedTuple

from treadle.envs.gsm8k import ANSWER_NOW, THINK_AGAIN


class Reply(NamedTuple):
    """One reply, and what `gsm8k` gives for it."""

    text: str
    reward: float
    golden: str = "72"


class Attempt(NamedTuple):
    """Replies, what `gsm8k_multi_turn` gives for each, and what it says after all but the last, which ends it."""

    replies: list[str]
    rewards: list[float]
    shown: list[str]
    max_turns: int = 5


REPLIES = {
    # what is an answer
    "right": Reply("48 + 24 = 72.\n#### 72", 1),
    "nothing else": Reply("#### 72", 1),
    "wrong": Reply("#### 73", 0),
    "empty": Reply("", 0),
    "no marker": Reply("The answer is 72.", 0),
    "marker alone": Reply("48 + 24 = 72 ####", 0),
    "marker and space": Reply("#### ", 0),
    "a boxed answer": Reply(r"\boxed{72}", 0),
    "three signs": Reply("### 72", 0),
    "five signs": Reply("##### 72", 1),
    "no space": Reply("####72", 0),
    "two spaces": Reply("####  72", 0),
    "a tab": Reply("####\t72", 0),
    "a line end": Reply("####\n72", 0),
    "in the middle of a line": Reply("So #### 72 is it.", 1),
    "in bold": Reply("**#### 72**", 1),
    "a bold number": Reply("#### **72**", 0),
    "a unit behind": Reply("#### 72 clips", 1),
    "a unit without space": Reply("#### 72kg", 1),
    "a percent sign": Reply("#### 72%", 1),
    "a dollar before": Reply("#### $72", 0),
    "a dollar behind": Reply("#### 72$", 1),
    "words before": Reply("#### Answer: 72", 0),
    "the published placeholder": Reply("#### ANSWER 72", 0),
    "other digits": Reply("#### \N{FULLWIDTH DIGIT SEVEN}\N{FULLWIDTH DIGIT TWO}", 0),
    # the first one counts
    "right, then wrong": Reply("#### 72\n#### 73", 1),
    "wrong, then right": Reply("#### 73\n#### 72", 0),
    "a marker without a number before": Reply("#### Steps\n48 + 24\n#### 72", 1),
    "an equation behind the marker": Reply("#### 48 + 24 = 72", 0),
    # numbers are compared character by character
    "a full stop behind": Reply("#### 72.", 0),
    "a comma behind": Reply("#### 72, I think", 1),
    "decimals": Reply("#### 72.0", 0),
    "a leading zero": Reply("#### 072", 0),
    "a plus": Reply("#### +72", 0),
    "thousands": Reply("#### 1,200", 1, "1200"),
    "thousands without comma": Reply("#### 1200", 1, "1200"),
    "commas anywhere": Reply("#### ,1,2,00,", 1, "1200"),
    "thousands with a space": Reply("#### 1 200", 0, "1200"),
    "thousands with a point": Reply("#### 1.200", 0, "1200"),
    "an exponent": Reply("#### 1.2e3", 0, "1200"),
    "negative": Reply("#### -3", 1, "-3"),
    "negative with a space": Reply("#### - 3", 0, "-3"),
    "negative dollars": Reply("#### -$3", 0, "-3"),
    "a true minus sign": Reply("#### \N{MINUS SIGN}3", 0, "-3"),
    "the sign is missing": Reply("#### 3", 0, "-3"),
    "two signs": Reply("#### --3", 0, "-3"),
    "a fraction": Reply("#### 0.5", 1, "0.5"),
    "a fraction without zero": Reply("#### .5", 0, "0.5"),
    "points only": Reply("#### ...", 0),
}

RIGHT, WRONG, NONE = "#### 72", "#### 73", "Hm."
ALL = [THINK_AGAIN, THINK_AGAIN, THINK_AGAIN, ANSWER_NOW]

ATTEMPTS = {
    "right at once": Attempt([RIGHT], [1], []),
    "right in the second turn": Attempt([WRONG, RIGHT], [0.04, 1], ALL[:1]),
    "right in the third": Attempt([WRONG, NONE, RIGHT], [0.04, 0, 1], ALL[:2]),
    "right in the fourth": Attempt([NONE, NONE, NONE, RIGHT], [0, 0, 0, 1], ALL[:3]),
    "right in the last": Attempt([WRONG, WRONG, WRONG, WRONG, RIGHT], [0.04, 0.04, 0.04, 0.04, 1], ALL),
    "always wrong": Attempt([WRONG] * 5, [0.04] * 5, ALL),
    "never an answer": Attempt([NONE] * 5, [0] * 5, ALL),
    "empty replies": Attempt([""] * 5, [0] * 5, ALL),
    "an answer in the last turn only": Attempt([NONE, NONE, NONE, NONE, WRONG], [0, 0, 0, 0, 0.04], ALL),
    "an answer in the first turn only": Attempt([WRONG, NONE, NONE, NONE, NONE], [0.04, 0, 0, 0, 0], ALL),
    "the first answer of a reply counts": Attempt([f"{WRONG} {RIGHT}", f"{RIGHT} {WRONG}"], [0.04, 1], ALL[:1]),
    "a full stop is another answer": Attempt(["#### 72.", RIGHT], [0.04, 1], ALL[:1]),
    "decimals are another answer": Attempt(["#### 72.0", RIGHT], [0.04, 1], ALL[:1]),
    "points are an answer": Attempt(["#### .", RIGHT], [0.04, 1], ALL[:1]),
    "a dollar is none": Attempt(["#### $72", RIGHT], [0, 1], ALL[:1]),
    "the same wrong answer pays again": Attempt([WRONG, WRONG, RIGHT], [0.04, 0.04, 1], ALL[:2]),
    "one turn": Attempt([WRONG], [0.2], [], max_turns=1),
    "one turn, right": Attempt([RIGHT], [1], [], max_turns=1),
    "two turns": Attempt([WRONG, WRONG], [0.1, 0.1], [ANSWER_NOW], max_turns=2),
    "four turns": Attempt([NONE, WRONG, NONE, RIGHT], [0, 0.05, 0, 1], [*ALL[:2], ANSWER_NOW], max_turns=4),
}
