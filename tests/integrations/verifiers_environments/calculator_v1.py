"""A tool server, as `vf-init --add-tool` lays it out."""

import verifiers.v1 as vf
from calculator_v1_tool import CalculatorToolset


class CalculatorData(vf.TaskData):
    answer: str


class CalculatorTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CalculatorTask(vf.Task[CalculatorData, vf.State, CalculatorTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [CalculatorToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class CalculatorConfig(vf.TasksetConfig):
    task: CalculatorTaskConfig = CalculatorTaskConfig()


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    def load(self):
        return [
            CalculatorTask(CalculatorData(prompt=f"What is {n} + 3?", answer=str(n + 3)), self.config.task)
            for n in range(4)
        ]


__all__ = ["CalculatorTaskset"]
