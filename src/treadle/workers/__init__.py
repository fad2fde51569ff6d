"""Other processes, called: one kind of worker, whatever carries its calls.

    Worker               open, call, post, close, tail
      child.ChildProcess     Treadle's Python on this machine: pickle over a socket
      placement.Actor        a Ray actor, perhaps on another node
    supervised.Supervised    keeps one running: another is started when it ends or falls silent (engines)
    gang.Gang                several that answer every call together: if one fails alone, all end (learner ranks)

On both ends calls have numbers (`calls`): `Calls` gives each answer to who waits for it, `Service` calls the object.
"""
