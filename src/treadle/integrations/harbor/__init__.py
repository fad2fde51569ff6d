"""Harbor: terminal and coding agents on tasks in sandboxes, played as attempts and trained.

    HarborDriver.play -> WorkerPool -> child/treadle_trials.py: Trial.create, run -> report
         |                                     | agent's calls
         v                                     v
    AgentSession   <------ Gateway <------ LiteLLM, a CLI in a sandbox, ...
         |
    outcomes.judge(report, what the gateway refused) -> Outcome

What is trained is what the gateway recorded, whatever agent made the calls. `child/` runs in Harbor's Python, knows its
versions, and nothing of Treadle.
"""
