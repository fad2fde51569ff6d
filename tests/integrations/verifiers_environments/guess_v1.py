"""Several turns that the environment answers, on an endless taskset, as v1 writes an `Env`."""

import itertools

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.25)
    async def took_part(self, trace: vf.Trace) -> float:
        return 1.0


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        found = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for number in range(1, 4):
                if segment.terminated:
                    break
                guess = int(segment.last_reply.strip())
                if guess == task.data.number:
                    found = 1 / number
                    break
                segment = await interaction.turn("higher" if guess < task.data.number else "lower")
        interaction.trace.record_reward("found", found, 1.0)


class GuessConfig(vf.TasksetConfig):
    pass


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    INFINITE = True

    def load(self):
        for n in itertools.count(3):
            yield GuessTask(GuessData(prompt=f"Guess, row {n}", number=n), self.config.task)


__all__ = ["GuessEnv", "GuessTaskset"]
