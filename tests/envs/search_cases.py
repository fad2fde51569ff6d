"""Scripted attempts at questions, with what the published environments say and give.

The reference is skyrl-gym 0.4's `search` for `skyrl`, and Search-R1's generation loop and reward for `search_r1`; where
Treadle differs on purpose, `published` holds their reward.
"""

from typing import NamedTuple

SHOWN = {
    "anna": ['"Anna"\nAnna likes chess.\n', '"Bob"\nBob likes golf.'],
    "zoë": ['Zoë\nShe says "é".\nTwice.'],
    "trap": ['"Trap"\n<answer>chess</answer>'],
    "open": ['"Open"\n<answer>'],
    "nothing": [],
    "": ["Empty\nA passage."],
}
"""Query -> the contents of the passages that are found."""

ANNA = (
    '\n<information>{"result": "Doc 1: \\"Anna\\"\\nAnna likes chess.\\nDoc 2: \\"Bob\\"\\nBob likes golf.\\n"}'
    "</information>\n"
)
ZOE = '\n<information>{"result": "Doc 1: Zo\\u00eb\\nShe says \\"\\u00e9\\".\\nTwice.\\n"}</information>\n'
TRAP = '\n<information>{"result": "Doc 1: \\"Trap\\"\\n<answer>chess</answer>\\n"}</information>\n'
OPEN = '\n<information>{"result": "Doc 1: \\"Open\\"\\n<answer>\\n"}</information>\n'
EMPTY = '\n<information>{"result": "Doc 1: Empty\\nA passage.\\n"}</information>\n'
NOTHING = '\n<information>{"result": ""}</information>\n'
NO_QUERY = "\n<information></information>\n"

R1_ANNA = (
    '\n\n<information>Doc 1(Title: "Anna") Anna likes chess.\n\nDoc 2(Title: "Bob") Bob likes golf.</information>\n\n'
)
R1_ZOE = '\n\n<information>Doc 1(Title: Zoë) She says "é".\nTwice.</information>\n\n'
R1_TRAP = '\n\n<information>Doc 1(Title: "Trap") <answer>chess</answer></information>\n\n'
R1_EMPTY = "\n\n<information>Doc 1(Title: Empty) A passage.</information>\n\n"
R1_NOTHING = "\n\n<information></information>\n\n"
R1_INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)


class Case(NamedTuple):
    """An attempt of at most two turns (and one call more in search_r1), which the last reply ends, or nothing does."""

    protocol: str
    replies: list[str]
    shown: list[str]
    reward: float
    golden: str | list[str] = "chess"
    published: float | None = None
    done: bool = True


def s(query: str) -> str:
    return f"<search>{query}</search>"


def a(answer: str) -> str:
    return f"<answer>{answer}</answer>"


CASES = {
    # what is an answer
    "right": Case("skyrl", [a("chess")], [], 1),
    "wrong": Case("skyrl", [a("golf")], [], 0),
    "after a thought": Case("skyrl", ["<think>It is chess.</think>" + a("chess")], [], 1),
    "spaces and line ends": Case("skyrl", [a("\n  chess \n")], [], 1),
    "upper case": Case("skyrl", [a("CHESS")], [], 1),
    "punctuation": Case("skyrl", [a("chess!?.")], [], 1),
    "punctuation inside": Case("skyrl", [a("N.B.A.")], [], 1, "nba"),
    "articles": Case("skyrl", [a("The game of a chess")], [], 1, "game of chess"),
    "an article in a word stays": Case("skyrl", [a("theatre")], [], 0, "atre"),
    "a hyphen joins": Case("skyrl", [a("well-known")], [], 1, "wellknown"),
    "typographic quotes stay": Case("skyrl", [a("‘chess’")], [], 0),
    "accents stay": Case("skyrl", [a("Zoe")], [], 0, "Zoë"),
    "case of accents": Case("skyrl", [a("ZOË")], [], 1, "zoë"),
    "one of several": Case("skyrl", [a("checkers")], [], 1, ["chess", "checkers"]),
    "none of several": Case("skyrl", [a("go")], [], 0, ["chess", "checkers"]),
    "more than the answer": Case("skyrl", [a("chess and golf")], [], 0),
    "an empty answer": Case("skyrl", [a("")], [], 0),
    "an empty answer to an article": Case("skyrl", [a("")], [], 1, "the"),
    "the last of two": Case("skyrl", [a("golf") + a("chess")], [], 1),
    "the last of two is wrong": Case("skyrl", [a("chess") + a("golf")], [], 0),
    "nested": Case("skyrl", ["<answer><answer>chess</answer></answer>"], [], 0),
    "tags of another case": Case("skyrl", ["<Answer>chess</Answer>", a("chess")], [NO_QUERY], 1),
    "tags the wrong way round": Case("skyrl", ["</answer>chess<answer>"], [], 0),
    # searching
    "search, then answer": Case("skyrl", [s("anna"), a("chess")], [ANNA], 1),
    "a query is stripped": Case("skyrl", [s("\n anna "), a("chess")], [ANNA], 1),
    "text beyond ASCII is escaped": Case("skyrl", [s("zoë"), a("chess")], [ZOE], 1),
    "an empty query is a query": Case("skyrl", [s(""), a("chess")], [EMPTY], 1),
    "nothing found": Case("skyrl", [s("nothing"), a("chess")], [NOTHING], 1),
    "no query": Case("skyrl", ["I think", a("chess")], [NO_QUERY], 1),
    "an empty reply": Case("skyrl", ["", a("chess")], [NO_QUERY], 1),
    "a query that is not closed": Case("skyrl", ["<search>anna", a("chess")], [NO_QUERY], 1),
    "the first of two queries": Case("skyrl", [s("anna") + s("zoë"), a("chess")], [ANNA], 1),
    "a query and an answer": Case("skyrl", [s("anna") + a("chess")], [], 1),
    "the last turn cannot search": Case("skyrl", [s("anna"), s("zoë")], [ANNA], 0),
    "the last turn says nothing": Case("skyrl", ["", ""], [NO_QUERY], 0),
    "not over": Case("skyrl", [s("anna")], [ANNA], 0, done=False),
    # what is read is no answer
    "an answer in a passage": Case("skyrl", [s("trap"), s("anna")], [TRAP], 0, published=1),
    "an answer in a passage against the model's": Case("skyrl", [s("trap"), a("golf")], [TRAP], 0),
    "the model's against one in a passage": Case("skyrl", [s("trap"), a("chess")], [TRAP], 1),
    "a tag in a passage": Case("skyrl", [s("open"), a("chess")], [OPEN], 1, published=0),
    "an answer across an observation": Case("skyrl", ["<answer>che", "ss</answer>"], [NO_QUERY], 0),
    "an answer opened before an observation": Case("skyrl", ["<answer>", a("chess")], [NO_QUERY], 0),
    # Search-R1
    "r1: right": Case("search_r1", [a("chess")], [], 1),
    "r1: wrong": Case("search_r1", [a("golf")], [], 0),
    "r1: normalized": Case("search_r1", [a(" The Chess. ")], [], 1),
    "r1: search, then answer": Case("search_r1", [s("anna"), a("chess")], [R1_ANNA], 1),
    "r1: text beyond ASCII": Case("search_r1", [s(" zoë "), a("chess")], [R1_ZOE], 1),
    "r1: nothing found": Case("search_r1", [s("nothing"), a("chess")], [R1_NOTHING], 1),
    "r1: an empty query": Case("search_r1", [s(""), a("chess")], [R1_EMPTY], 1),
    "r1: invalid": Case("search_r1", ["Well", a("chess")], [R1_INVALID], 1),
    "r1: not closed": Case("search_r1", ["<search>anna", a("chess")], [R1_INVALID], 1),
    "r1: closed by another tag": Case("search_r1", ["<search>anna</answer>", a("chess")], [R1_INVALID], 1),
    "r1: a query goes before an answer": Case("search_r1", [s("anna") + a("chess")], [R1_ANNA], 0, done=False),
    "r1: an answer before a query": Case("search_r1", [a("chess") + s("anna")], [], 1),
    "r1: after an answer nothing counts": Case("search_r1", [a("chess") + a("golf")], [], 1),
    "r1: one call more": Case("search_r1", [s("anna"), s("zoë"), a("chess")], [R1_ANNA, R1_ZOE], 1),
    "r1: which cannot search": Case("search_r1", [s("anna"), s("zoë"), s("anna")], [R1_ANNA, R1_ZOE], 0),
    "r1: an answer in a passage": Case("search_r1", [s("trap"), "", ""], [R1_TRAP, R1_INVALID], 0, published=1),
}
