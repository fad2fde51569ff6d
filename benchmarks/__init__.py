"""Benchmarks, each run from the repository as `python -m benchmarks.NAME`; `--help` has its options and examples.

    rollout         multi-turn sampling: engines against transformers' `generate`
    update          one optimizer update under each packing, of the demo's shape or replayed from a run
    packing         forward and backward passes of each packing on six workloads; tree attention alone
    datums          a Tinker client's datums in one call, against one at a time
    merge           building prefix trees, against plain Python
    gateway         what the gateway adds to calling a session directly
    render          the next prompt of long conversations, against tokenizing them anew
    asynchronous    what `orchestration.max_staleness` gains: the loop in virtual time
    kv              admission to an engine's KV cache, by count or by budget, in virtual time
    scaling         one update by several ranks: time, balance, memory
    many_sessions   what a run's own process spends on thousands of open sessions
    scale_on_paper  a run at 8 to 4,096 GPUs, from data sheets and the simulated loop
    retrieval       the BM25 server: CPU, latency, correctness
    large_data      a million rows of Parquet before the first task
    recipe_runs     recipes over seeds and variants: table, JSON, picture
    against_trl     single-turn GRPO beside TRL, and one gradient by both
    adapters        publication of LoRA adapters to vLLM, beside full weights
    gpu_check       what runs on a GPU, checked and measured

`results/` holds the figures that the documentation quotes. `measure` and `workloads` are shared.
"""

from treadle.loop.thread_count import wait_passively

wait_passively()  # as every run does, before torch is loaded
