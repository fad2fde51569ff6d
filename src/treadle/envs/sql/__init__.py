"""Text-to-SQL: the environment, and the confined processes in which the model's queries run."""
