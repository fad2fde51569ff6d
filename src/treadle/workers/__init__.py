"""Calls of other processes: one kind of worker, with several carriers.

    Worker               open, call, post, close, tail
      child.ChildProcess     Treadle's Python on this machine: pickle over a socket
      placement.Actor        a Ray actor, perhaps on another node
    supervised.Supervised    keeps one running: starts another when it ends or falls silent (engines)
    gang.Gang                several that answer every call together: if one fails alone, all end (learner ranks)

On both ends calls have numbers (`calls`): `Calls` delivers each answer to its caller, `Service` calls the object; also
in foreign Pythons, where a process is started by the next call instead, and one that is not used any more drains.

    program.Program          any program; all it starts ends with it (agents, vLLM servers, foreign Pythons)
    foreign.WorkerPool       a Python without Treadle: JSON lines over a socket, many attempts each
    confined.ChildPool       confined children for model output: a line of JSON each way, one request at a time
"""
