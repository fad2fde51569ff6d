"""Worker processes: libraries that need a Python of their own, behind one protocol.

    pool = WorkerPool(WorkerProgram("Harbor", handler=Path("trials.py"), python="…/bin/python", remedy="make one: …"))
    async with pool:                                        # starts the processes; ConfigError if one cannot be
        answer = await pool.call({"task": "hello"})         # cancelling the call cancels the attempt in the process

    Treadle's Python                                        the library's Python
    WorkerPool ── WorkerProcess ── supervisor.py ──────────> child.py ── handler file
                       └──────────── socket, JSON lines ────────┘

The **handler file** imports the library and nothing of Treadle (modules beside it and in the run's directory can be
imported). It has:

    async def run(payload: dict, stop: asyncio.Event) -> dict     plays one attempt; many run at once, on one event loop
    async def start(options: dict) -> dict                        optional, awaited once, before the first attempt; what
                                                                  it raises is a ConfigError of the pool's start, what
                                                                  it returns is `pool.ready.info`
    async def close() -> None                                     optional, awaited once the last attempt is over
    def versions() -> dict[str, str]                              optional: of the library, for `pool.ready.versions`

`stop` is set when the caller asks the attempt to come to an end early and still give a result; a cancelled attempt gets
asyncio's CancelledError, has `limits.cleanup` seconds to clean up, and gives none.

What can go wrong, and what the caller of `pool.call` gets:

    the handler raises, exits, or allocates too much    TrajectoryFailure(program.cause), with its traceback
    it returns no JSON object, or too much of it        the same
    the process dies, is killed, or its event loop      TrajectoryFailure(program.lost_cause) for all its attempts; the
    is blocked for `limits.silence` seconds             next call starts another one, and other processes go on

What handler and library print goes to the tail of a log, of which an error shows the end. Nothing that a process
started outlives it, also where the run or the process is killed (`rollout.agents.supervisor`).
"""

from treadle.integrations.worker.pool import Ready, WorkerConfig, WorkerLimits, WorkerPool, WorkerProgram

__all__ = ["Ready", "WorkerConfig", "WorkerLimits", "WorkerPool", "WorkerProgram"]
