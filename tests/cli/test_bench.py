"""`treadle bench`: a table, or one JSON object."""

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.conftest import Trained
from treadle.benchmarks import gateway, kernels, merge, packing, render, rollout, scaling, update
from treadle.benchmarks.meter import peak_bytes
from treadle.benchmarks.report import Report, Reports
from treadle.benchmarks.workloads import WORKLOADS, Size
from treadle.cli.bench import show
from treadle.cli.main import main
from treadle.packing.flat import PackedCall, calls, flatten
from treadle.training.forward import Forward

COLUMNS = {
    "rollout": ["model", "engine", "sessions", "turns", "sampled tokens", "s", "tokens/s", "times generate"],
    "update": ["packing", "micro-batch tokens", "sequences", "tokens computed", "CPU s", "times step"],
}


def test_importing_treadle_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "import", "--json", "--repeats", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    seconds = {row["statement"]: row["CPU s"] for row in report["rows"]}
    assert report["benchmark"] == "import" and seconds["import treadle"] > 0


@pytest.mark.slow
def test_the_gateway_benchmark_tells_what_it_adds() -> None:
    direct, through = gateway.measure(1, 1, [gateway.Load(2, 5, 0.01)]).rows
    assert (direct["way"], through["way"]) == ("session", "gateway")
    assert min(float(direct["p50 ms"]), float(through["p50 ms"])) >= 10
    assert through["added p50 ms"] == float(through["p50 ms"]) - float(direct["p50 ms"])
    assert float(through["CPU ms per request"]) > float(direct["CPU ms per request"]) > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_benchmark_prints_a_table_or_one_json_object(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = rollout.measure(1, 1, (2,), vllm=False) if name == "rollout" else update.measure(1, 1, tasks=2)
    show(report, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == name
    seconds = next(column for column in COLUMNS[name] if column.split()[-1] == "s")
    assert all(list(row) == COLUMNS[name] and row[seconds] > 0 for row in found["rows"])
    show(report, as_json=False)
    table = capsys.readouterr().out
    assert f"treadle bench {name}" in table and seconds in table


@pytest.mark.slow
def test_chain_computes_fewer_tokens_than_step() -> None:
    tokens = {row["packing"]: float(row["tokens computed"]) for row in update.measure(1, 1, tasks=2).rows}
    assert tokens["chain"] < tokens["step"]


@pytest.mark.slow
def test_recorded_updates_are_replayed_under_each_packing(finished: Trained) -> None:
    rows = {row["packing"]: row for row in update.measure(1, 1, run=finished.path).rows}
    tokens = {packing: float(row["tokens computed"]) for packing, row in rows.items()}
    assert tokens["tree"] < tokens["step"] and tokens["chain"] == tokens["step"]  # one turn: nothing to chain
    assert all(float(row["CPU s"]) > 0 for row in rows.values())


@pytest.mark.slow
def test_rendering_is_measured_for_conversations_of_several_lengths() -> None:
    rows = render.measure(1, 1, messages=(4, 8)).rows
    assert [row["messages"] for row in rows] == [4, 8]
    assert all(float(row["ms a call"]) > 0 for row in rows)


@pytest.mark.slow
def test_updates_of_several_ranks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_RANKS", (1, 2))
    monkeypatch.setattr(scaling, "_SIZE", SMALL)
    rows = scaling.measure(1, 1).rows
    assert [row["ranks"] for row in rows] == [1, 2] * 3
    for one, two in zip(rows[::2], rows[1::2], strict=True):
        assert one["slot balance"] == one["times one"] == 1 and one["padded passes"] == 0
        assert two["slot balance"] == 0.5 and two["padded passes"] == 1  # one tree, two ranks
        assert all(float(row["MiB a rank"]) > 50 and float(row["CPU s"]) > 0 for row in (one, two))


def test_an_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


SMALL = Size(attempts=2, turns=4, system=10, task=4, thinking=6, action=4, observation=6)
SMALL_MODEL = {
    **packing.CPU_MODEL,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
TABLE_COLUMNS = {
    "packing": [
        *("workload", "packing", "sequences", "longest row", "trained tokens", "tokens computed"),
        *("CPU s", "peak MiB", "times step", "times chain"),
    ],
    "packing: tokens computed again": [
        *("workload", "micro-batch tokens", "micro-batches", "unique nodes", "tokens computed", "of unique"),
    ],
    "packing: streaming": [
        *("nodes at a time", "chunks", "nodes", "CPU s", "of whole", "peak MiB", "of whole's peak"),
    ],
    "packing: attention alone": [
        *("tokens", "tree ms", "dense mask ms", "plain causal ms", "times dense", "times causal"),
    ],
    "packing: log-probabilities alone": [
        *("logits", "tokens", "CPU s", "ms per token", "peak MiB", "KiB per token"),
    ],
}


def prefixes(found: list[PackedCall], owner: str) -> int:
    """Unique nodes, by definition."""
    return len({(getattr(c, owner), c.token_ids[:n].tobytes()) for c in found for n in range(1, len(c.token_ids) + 1)})


@pytest.fixture(scope="module")
def packed() -> Reports:
    model = packing._model(SMALL_MODEL, 1024)
    tables = [
        packing.packings(Forward(model, 10_000), 1, SMALL, {"again": Forward(model, 10_000)}),
        packing.recomputed(SMALL, (64,)),
        packing.streaming(model, 1, SMALL, (32,)),
        kernels.attention(1, (64,)),
        kernels.logprobs(rows=8, whole_rows=4, vocabulary=50, hidden_size=8),
    ]
    return Reports("packing", tables)


@pytest.mark.slow
def test_the_packing_benchmark_prints_all_its_tables(packed: Reports, capsys: pytest.CaptureFixture[str]) -> None:
    show(packed, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "packing"
    assert {t["table"]: list(t["rows"][0]) for t in found["tables"]} == TABLE_COLUMNS
    for table in found["tables"]:
        assert all(list(row) == TABLE_COLUMNS[table["table"]] for row in table["rows"])
        assert all(value > 0 for row in table["rows"] for value in row.values() if not isinstance(value, str))
    show(packed, as_json=False)
    out = capsys.readouterr().out
    assert all(f"treadle bench {name}\n" in out for name in TABLE_COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_is_computed_is_what_is_unique(packed: Reports, workload: str) -> None:
    batch = flatten(WORKLOADS[workload](SMALL))
    found = calls(batch)
    rows = {str(row["packing"]): row for row in packed.tables[0].rows if row["workload"] == workload}
    computed = {name: row["tokens computed"] for name, row in rows.items()}
    assert computed["step"] == sum(len(c.token_ids) for c in found)
    assert computed["tree, trajectory"] == prefixes(found, "trajectory")
    assert computed["tree, group"] == computed["tree, group, again"] == prefixes(found, "group")
    assert all(row["trained tokens"] == len(batch) for row in rows.values())
    assert (rows["step"]["sequences"], rows["tree, group"]["sequences"]) == (len(found), len(batch.groups))
    assert rows["step"]["longest row"] == max(len(c.token_ids) for c in found)
    assert rows["tree, group"]["longest row"] == max(
        prefixes([c for c in found if c.group == group], "group") for group in range(len(batch.groups))
    )
    if len(batch.groups) > 1:
        assert float(computed["tree, batch"]) < float(computed["tree, group"])


def test_workloads_are_what_they_are_called() -> None:
    def continued(name: str) -> float:
        """The share of calls whose prompt begins with the call before."""
        [group] = WORKLOADS[name](Size(attempts=5, turns=6))
        pairs = [(a, b) for t in group.trajectories for a, b in zip(t.steps, t.steps[1:], strict=False)]
        return float(np.mean([np.array_equal(b.prompt_ids[: len(a.full_ids)], a.full_ids) for a, b in pairs]))

    assert continued("append-only") == 1.0
    assert continued("20% drift") == 0.8
    assert continued("thinking stripped") == 0.0
    assert continued("sliding context") == 3 / 5  # until the window is full
    assert 0 < continued("sub-agent forks") < 1
    first, second = WORKLOADS["long system prompt"](Size())
    one, other = (g.trajectories[0].steps[0].prompt_ids for g in (first, second))
    assert np.array_equal(one[:1536], other[:1536]) and not np.array_equal(one, other)


def test_peak_memory_is_counted_to_the_byte() -> None:
    def run() -> None:
        first = torch.empty(3000, dtype=torch.uint8)
        del first
        second, third = torch.empty(2000, dtype=torch.uint8), torch.empty(2000, dtype=torch.uint8)
        del second, third

    assert peak_bytes(run, torch.device("cpu")) == 4000


def test_earlier_tensors_that_are_freed_meanwhile_do_not_count() -> None:
    def run() -> None:
        gc.collect()
        torch.empty(2000, dtype=torch.uint8)

    cycle: list[Any] = [torch.empty(3000, dtype=torch.uint8)]
    cycle.append(cycle)
    del cycle
    assert peak_bytes(run, torch.device("cpu")) == 2000


def test_logits_in_chunks_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.training.lm_head.CHUNK_BYTES", 4 * 500 * 4)
    whole, chunks, more = kernels.logprobs(rows=128, whole_rows=64, vocabulary=500, hidden_size=8).rows
    assert float(chunks["peak MiB"]) < float(whole["peak MiB"]) / 2
    assert float(more["peak MiB"]) < float(chunks["peak MiB"]) * 1.5


@pytest.mark.parametrize("forks", [False, True])
def test_the_merge_benchmark(forks: bool, capsys: pytest.CaptureFixture[str]) -> None:
    case = merge.Case(calls=60, length=80, forks=forks)
    report: Report = merge.measure(1, 1, (case,))
    show(report, as_json=True)
    rows = {row["way"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    found = merge.recorded(case)
    assert [*rows][:3] == ["treadle", "dict trie", "list merge"]
    assert all([*row][-4:] == ["CPU s", "steps per s", "Mtokens per s", "treadle is times"] for row in rows.values())
    assert {row["tokens"] for row in rows.values()} == {sum(len(c.token_ids) for c in found)}
    assert rows["treadle"]["tokens left"] == rows["dict trie"]["tokens left"] == prefixes(found, "group")
    if not forks:
        assert rows["list merge"]["tokens left"] == prefixes(found, "trajectory") == 6 * 80


def test_a_list_merge_of_skyrls_kind_where_it_is_installed() -> None:
    pytest.importorskip("skyrl")
    found = merge.recorded(merge.Case(calls=60, length=80))
    skyrl = merge._skyrl()
    assert skyrl is not None and skyrl(merge._skyrl_input(found)) == merge.list_merge(merge._records(found))


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "packing", "--device", "cuda"]) == 2
    assert "--device cuda: this torch sees no CUDA device" in capsys.readouterr().err
    assert main(["bench", "update", "--device", "cuda"]) == 2
    assert "'treadle bench update' runs on the CPU alone" in capsys.readouterr().err


@pytest.mark.slow
def test_a_benchmark_writes_its_json_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "import", "--json", "--output", str(tmp_path / "import.json")]) == 0
    assert json.loads((tmp_path / "import.json").read_text()) == json.loads(capsys.readouterr().out)
    assert main(["bench", "import", "--output", str(tmp_path / "no" / "import.json")]) == 2
    assert "there is no directory" in capsys.readouterr().err
