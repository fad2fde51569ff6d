"""The demo's questions as a job for agent programs: one agent each with OpenAI's SDK, Anthropic's, and none.

    treadle train lookup_agent
    treadle train lookup_agent agent=treadle.recipes.agents.with_anthropic:solve
    treadle train lookup_agent agent=treadle.recipes.agents.as_program:solve
"""
