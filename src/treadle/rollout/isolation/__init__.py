"""The one boundary through which a run calls user code: its errors, its time limits, its blocking of the event loop.

Each guard is for one way to hang:

    a call that does not return            `UserCode.call`, by its time limit: the attempt fails with cause timeout;
      `while True: pass` in a thread         a coroutine is cancelled, a thread is abandoned (at most `MAX_ABANDONED`)
    a call that blocks the event loop      `watched_event_loop`, a thread that asks the loop for a sign of life: a
      `time.sleep(9)` in `async def`         warning with the line, and `UserCode.blocked_seconds`
    a task that ignores cancellation       `event_loop._end_tasks`, after 60 s, or 1 s after a second Ctrl-C: named and
      `except CancelledError: pass`          left behind
    a call that stops or exits the loop    `event_loop.run`: RunError for `loop.stop()`; SystemExit fails what awaits it
    a `main` that ignores Ctrl-C           `interrupts.Interrupter`: a second one stops the loop
    a loop that does not react to that     `Interrupter._insist`, a thread: raises `Interrupt` in the main thread every
      a C call, a blocking read              half second until it does
    an import that swallows Ctrl-C         `interrupts.never_swallowed`: raised when the import is over

Time limits are for attempts, the watch is for whoever writes user code, and Ctrl-C is for who waits at the terminal:
none stands in for another. A process that is called has guards of its own (`workers`).
"""
