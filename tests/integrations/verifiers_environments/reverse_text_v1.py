"""One reply, a reward and a metric, as `vf-init` lays out a taskset of v1."""

import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def exact(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class ReverseConfig(vf.TasksetConfig):
    texts: tuple[str, ...] = ("abc", "hello there", "one two three")


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self):
        return [
            ReverseTask(ReverseData(prompt=f"Reverse: {text}", answer=text[::-1]), self.config.task)
            for text in self.config.texts
        ]


__all__ = ["ReverseTaskset"]
