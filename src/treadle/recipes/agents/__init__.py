"""The demo's questions as a job for agent programs: one agent each with OpenAI's SDK, Anthropic's, and none."""
