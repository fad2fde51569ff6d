"""Corpora for tests, and BM25 by its definition."""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from treadle.retrieval.corpus import Hit
from treadle.retrieval.index import words


def texts(count: int, seed: int = 0, vocabulary: int = 200, length: int = 12) -> list[str]:
    """Texts of words that are the rarer the higher their number."""
    draws = random.Random(seed)
    weights = [1 / (n + 1) for n in range(vocabulary)]
    return [
        " ".join(f"w{n}" for n in draws.choices(range(vocabulary), weights, k=draws.randint(1, length)))
        for _ in range(count)
    ]


def write_corpus(path: Path, contents: Sequence[str]) -> Path:
    rows = [json.dumps({"id": str(number), "contents": text}) for number, text in enumerate(contents)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def brute_force(contents: Sequence[str], query: str, topk: int, k1: float = 1.5, b: float = 0.75) -> list[Hit]:
    """BM25 as Lucene has it, of every passage."""
    rows = [Counter(words(text)) for text in contents]
    holding = Counter(word for row in rows for word in row)
    mean = sum(row.total() for row in rows) / len(rows)
    hits = []
    for number, row in enumerate(rows):
        score = 0.0
        for word in words(query):
            rarity = math.log(1 + (len(rows) - holding[word] + 0.5) / (holding[word] + 0.5))
            score += rarity * row[word] / (row[word] + k1 * (1 - b + b * row.total() / mean)) if row[word] else 0.0
        if score > 0:
            hits.append(Hit(number, score))
    return sorted(hits, key=lambda hit: (-hit.score, hit.passage))[:topk]
