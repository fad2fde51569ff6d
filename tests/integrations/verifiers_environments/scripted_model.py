"""What the scripted model says, by what it reads; for Treadle's engine and for the library's own loop alike."""

import re

GUESSES = {3: ["3"], 4: ["6", "3", "4"], 5: ["3", "5"], 6: ["1", "2", "3", "4", "5", "5"]}


def reply(text: str, turns: int) -> str:
    """text: all that it reads. turns: how many replies it has given before."""
    if found := re.search(r"Reverse: ([a-z ]+)", text):
        words = found[1].strip()
        if "<reversed>" in text:
            return {"abc": "<reversed>cba</reversed>", "hello there": "ereht olleh"}.get(
                words, "<reversed>no</reversed>"
            )
        return {"abc": "cba", "hello there": "ereht"}.get(words, words)
    if found := re.search(r"row (\d+)", text):
        guesses = GUESSES[int(found[1])]
        return guesses[min(turns, len(guesses) - 1)]
    if found := re.search(r"What is (\d+) \+ 3", text):
        number, name = int(found[1]), "calculator_add" if "calculator_add" in text else "add"
        if turns == 0 and number != 3:
            return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {number}, "b": 3}}}}</tool_call>'
        return str(number + 3 - (number == 2))
    raise ValueError(f"no reply to {text!r}")
