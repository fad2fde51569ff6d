"""Tasks of GSM8K from its own files: rows with `question`, and `answer`, a solution that ends with `#### ANSWER`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from treadle.core.errors import DataError
from treadle.core.types import Message, Task
from treadle.data.config import Columns, SourceConfig
from treadle.data.load import LoadContext, open_rows
from treadle.data.rows import make_task
from treadle.envs.gsm8k import INSTRUCTION, MULTI_TURN_INSTRUCTION, answer_of

_COLUMNS: Columns = {"prompt": "question", "ground_truth": "answer"}


def gsm8k_questions(split: str, file: str, multi_turn: bool = False, file_split: str = "") -> Iterator[Task]:
    """Yield the tasks of a file: the question with the published instruction behind it, and the answer alone.

        Task("test-000001", prompt=({"role": "user", "content": "Janet's ducks ... after \\"####\\"."},),
             ground_truth="18")

    file: Parquet or JSON lines, or whatever else `data.train.source` takes; file_split: which split of it.
    multi_turn: whether the instruction asks for a tentative answer, as that of the environment `gsm8k_multi_turn` does.
    Raises ConfigError; DataError for a row, naming it.
    """
    instruction = MULTI_TURN_INSTRUCTION if multi_turn else INSTRUCTION
    for row in open_rows(SourceConfig(source=file, split=file_split), split, f"data.{split}", LoadContext()):
        task = make_task(row, _COLUMNS)
        answer = answer_of(task.ground_truth) if isinstance(task.ground_truth, str) else None
        if answer is None:
            raise DataError(f"{row.where}: answer is {task.ground_truth!r:.100}; it must end with '#### ANSWER'")
        [question] = task.prompt
        prompt = (Message(role="user", content=f"{question['content']} {instruction}"),)
        yield replace(task, prompt=prompt, ground_truth=answer)
