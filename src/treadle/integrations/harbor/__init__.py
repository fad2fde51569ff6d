"""Harbor: terminal and coding agents on tasks in sandboxes, played as attempts and trained.

    HarborDriver.play -> WorkerPool -> child/treadle_trials.py: Trial.create, run -> report
         |                                     | agent's calls
         v                                     v
    AgentSession   <------ Gateway <------ LiteLLM, a CLI in a sandbox, ...
         |
    outcomes.judge(report, the gateway's refusal) -> Outcome

Training uses the gateway's record, whatever agent made the calls. `child/` runs in Harbor's Python, handles its
versions, and does not import Treadle.
"""
