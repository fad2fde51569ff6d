"""vLLM as an engine: servers with one HTTP client each, publication of weights in flight, and `VLLMEngine` over them.

    VLLMEngine.generate -> Server.post -> POST /inference/v1/generate        ids in, ids, logprobs and versions out
    Publication.publish -> stage -> score -> pause -> load -> resume -> prove -> admit
    Publication         -> Transfer: SharedMemory (a file) or Collective (a broadcast, worker/treadle_group.py)
    open_engine         -> ServerProcess -> vLLM, with worker/treadle_worker.py inside

`worker` runs inside vLLM's own virtual environment and imports nothing of Treadle.
"""
