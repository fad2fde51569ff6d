"""Worker processes: libraries that need their own Python, behind one protocol.

    pool = WorkerPool(WorkerProgram("Harbor", handler=Path("trials.py"), python="…/bin/python", remedy="make one: …"))
    async with pool:                                        # starts the processes; ConfigError if that fails
        answer = await pool.call({"task": "hello"})         # cancelling the call cancels the attempt in the process

    Treadle's Python                                        the library's Python
    WorkerPool ── WorkerProcess ── reaper.py ──────────────> child.py ── handler file
                       └──────────── socket, JSON lines ────────┘

The **handler file** imports the library and nothing of Treadle (modules beside it and in the run's directory are
importable). It has:

    async def run(payload: dict, stop: asyncio.Event) -> dict     plays one attempt; many run concurrently on one loop
    async def start(options: dict) -> dict                        optional, awaited once, before the first attempt; its
                                                                  errors become a ConfigError of the pool's start, its
                                                                  result is `pool.ready.info`
    async def close() -> None                                     optional, awaited once after the last attempt
    def versions() -> dict[str, str]                              optional: library versions, for `pool.ready.versions`

`stop` is set when the caller asks the attempt to end early but still give a result; a cancelled attempt gets asyncio's
CancelledError, has `limits.cleanup` seconds to clean up, and returns nothing.

Possible failures, and their effect on the caller of `pool.call`:

    the handler raises, exits, or allocates too much    TrajectoryFailure(program.cause), with its traceback
    it returns no JSON object, or too much of it        the same
    the process dies, is killed, or its event loop      TrajectoryFailure(program.lost_cause) for all its attempts; the
    is blocked for `limits.silence` seconds             next call starts another one, and other processes continue

Output of handler and library goes to a log, and errors show its end. Nothing started by a process outlives it, even if
the run or the process is killed (`workers.program`).
"""

from treadle.integrations.worker.pool import Ready, WorkerConfig, WorkerLimits, WorkerPool, WorkerProgram

__all__ = ["Ready", "WorkerConfig", "WorkerLimits", "WorkerPool", "WorkerProgram"]
